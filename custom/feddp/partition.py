"""The private rule: it defines which tensors of a network are private, for all other packages.

A rule is a tuple of role words, such as `(QUERY, HEAD)`. A module declares the roles of its direct children in an attribute
`roles` (of the class or the instance): `{"query": ("q",)}` on an attention layer, `{"head": ("segmentation_head",)}` on a
network. `resolve` turns the rule into exact state_dict keys, once; no other code matches names.

Buffers, integer counters included, belong to their layer: a private batch normalisation keeps its weight, bias, running_mean,
running_var and num_batches_tracked; a shared one exchanges all five. Only NORM_STATISTICS divides a layer: it selects the last
three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.errors import InputError

# the role words are read without importing torch: the command line lists them (`feddp methods`)
if TYPE_CHECKING:
    from torch import Tensor, nn

QUERY = "query"
KEY = "key"
VALUE = "value"
HEAD = "head"
NORM = "norm"
NORM_STATISTICS = "norm_statistics"  # the buffers of normalisations: running mean and variance, and their counter
ENCODER = "encoder"
DECODER = "decoder"
CALIBRATOR = "calibrator"  # layers that a method adds for the site itself
PROJECTOR = "projector"  # of pFLFE, beside the encoder
PERSONAL_HEAD = "personal_head"  # of FedRoD, beside the segmentation head
ADAPTER = "adapter"  # low-rank adapters in the attention
SPATIAL_ADAPTER = "spatial_adapter"  # of FedOAP, before the segmentation head
AFFINITY_QUERY = "affinity_query"  # virtual classes: personalized affinity aggregation in every level of the decoder
AFFINITY_KEY = "affinity_key"
AFFINITY_MATRIX = "affinity_matrix"
LEVELS = tuple(f"{DECODER}.{level}" for level in range(1, 6))  # level 1 is next to the output (feddp.networks.levels)
NONE = "none"
ALL = "all"
_AFFINITY = (AFFINITY_QUERY, AFFINITY_KEY, AFFINITY_MATRIX)
ROLES = (
    *(QUERY, KEY, VALUE, HEAD, NORM, NORM_STATISTICS, ENCODER, DECODER, CALIBRATOR, PROJECTOR, PERSONAL_HEAD, ADAPTER),
    *(SPATIAL_ADAPTER, *_AFFINITY, *LEVELS),
)
WORDS = (*ROLES, NONE, ALL)

Rule = tuple[str, ...]
Tensors = dict[str, "Tensor"]  # by name

# where a role is a method's only one, no other role helps
_REMEDIES = {NORM_STATISTICS: "choose a network with batch normalisation, such as resnet18-fpn or unet"}
_FUSED = ("qkv", "kv", "in_proj_weight")  # in_proj_weight: torch.nn.MultiheadAttention


@dataclass(frozen=True)
class Partition:
    """The keys of one network's state_dict: `shared` tensors travel, `private` tensors never leave the site.

    Both are in state_dict order; together they hold every key once.
    """

    shared: tuple[str, ...]
    private: tuple[str, ...]

    def split(self, state: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
        """Splits a whole state into (shared, private): detached clones on the CPU. InputError for a missing or extra key."""
        check_keys(state, self.shared + self.private, "the network's state")
        return _clone(state, self.shared), _clone(state, self.private)

    def join(self, shared: Mapping[str, Tensor], private: Mapping[str, Tensor]) -> Tensors:
        """Joins (shared, private) to a whole state of detached clones on the CPU, for a strict `load_state_dict`."""
        check_keys(shared, self.shared, "the shared part")
        check_keys(private, self.private, "the private part")
        return _clone(shared, self.shared) | _clone(private, self.private)


def resolve(network: nn.Module, rule: Rule) -> Partition:
    """Returns the partition of `network` under `rule`.

    `(NONE,)` and `(ALL,)` cannot be combined with other words.

    Raises:
        InputError: a word is unknown or selects no tensor, a rule other than ALL selects everything, a declared child does not
            exist, a fused attention layer is under query/key/value, or a tensor has both a shared and a private name (tied
            weights would leak).
    """
    _check_words(rule)
    rule, keys = tuple(rule), tuple(network.state_dict())
    if rule == (NONE,):
        return Partition(keys, ())
    if rule == (ALL,):
        return Partition((), keys)
    private = chosen(network, rule)
    if private == set(keys):
        name = type(network).__name__
        raise InputError(f"the private rule {rule} selects every tensor of {name}; say ('{ALL}',) if that is meant")
    partition = Partition(tuple(k for k in keys if k not in private), tuple(k for k in keys if k in private))
    _refuse_ties(network, partition)
    return partition


def chosen(network: nn.Module, roles: Rule) -> set[str]:
    """Returns the state_dict keys of several roles; raises InputError for an unknown role or one without a tensor."""
    _check_words(roles)
    keys: set[str] = set()
    for word in roles:
        selected = select(network, word)
        if not selected:
            name, remedy = type(network).__name__, _REMEDIES.get(word, "choose a role that this network has")
            raise InputError(f"the role '{word}' selects no tensor of {name}; {remedy}")
        keys |= selected
    return keys


def check_keys(state: Iterable[str], expected: Iterable[str], what: str) -> None:
    """Raises InputError with up to three missing and three extra keys if `state` does not have exactly the `expected` keys."""
    names, wanted = dict.fromkeys(state), dict.fromkeys(expected)
    missing = [name for name in wanted if name not in names]
    extra = [name for name in names if name not in wanted]
    if missing or extra:
        raise InputError(
            f"{what} does not fit the network: missing {some(missing)}, unexpected {some(extra)}; "
            "both sides must run the same network and the same private rule"
        )


def some(names: list[str], limit: int = 3) -> str:
    """Returns the first `limit` names and the number of the others, for an error message."""
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _check_words(rule: Rule) -> None:
    if isinstance(rule, str) or not rule:
        raise InputError(f"a private rule is a tuple of role words, not {rule!r}; for nothing private say ('{NONE}',)")
    for word in rule:
        if word not in WORDS:
            raise InputError(f"unknown private role {word!r}; the roles are {', '.join(WORDS)}")
        if word in (NONE, ALL) and len(rule) > 1:
            raise InputError(f"'{word}' must be the only word of a private rule, not one of {tuple(rule)}; remove the others")


def select(network: nn.Module, word: str) -> set[str]:
    """Returns the state_dict keys of one role, empty if the network has no such layer (NONE and ALL are not roles)."""
    from torch import nn

    keys: set[str] = set()
    # a module registered twice has two names in state_dict; both count
    for path, module in network.named_modules(remove_duplicate=False):
        if word in (NORM, NORM_STATISTICS):
            if is_normalisation(module):
                keys |= _keys_of(module, path, buffers=word == NORM_STATISTICS)
            continue
        if word in (QUERY, KEY, VALUE):
            _refuse_fused(module, path)
        for child_name in getattr(module, "roles", {}).get(word, ()):
            child = getattr(module, child_name, None)
            where = f"{path}.{child_name}" if path else child_name
            if not isinstance(child, nn.Module):
                raise InputError(
                    f"{type(module).__name__} declares '{where}' as its {word}, but has no such layer; correct its `roles`"
                )
            keys |= _keys_of(child, where)
    return keys


def constants(network: nn.Module) -> Tensors:
    """Returns clones of the buffers that never change after the start; a module names its own in an attribute `constants`."""
    state = network.state_dict()
    named = (f"{path}.{name}" for path, module in network.named_modules() for name in getattr(module, "constants", ()))
    return _clone(state, tuple(name for name in named if name in state))


def is_normalisation(layer: nn.Module) -> bool:
    """Returns whether `layer` is a batch, instance, group or layer normalisation."""
    from torch.nn import GroupNorm, LayerNorm
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    return isinstance(layer, (_BatchNorm, _InstanceNorm, GroupNorm, LayerNorm))


def _keys_of(module: nn.Module, path: str, buffers: bool = False) -> set[str]:
    """Returns the state_dict keys of `module`, which lies at `path`; `buffers`: without its parameters."""
    left_out = dict(module.named_parameters()) if buffers else ()
    return {f"{path}.{key}" if path else key for key in module.state_dict() if key not in left_out}


def _refuse_fused(module: nn.Module, path: str) -> None:
    from torch import nn

    for name in _FUSED:
        if isinstance(getattr(module, name, None), (nn.Module, nn.Parameter)):
            raise InputError(
                f"'{f'{path}.{name}'.lstrip('.')}' fuses query, key or value in one tensor, which cannot be divided; "
                "build the network with separate layers (see feddp.networks.attention.split_kv)"
            )


def _refuse_ties(network: nn.Module, partition: Partition) -> None:
    tensors = network.state_dict(keep_vars=True)
    private = {id(tensors[key]): key for key in partition.private}
    for key in partition.shared:
        if id(tensors[key]) in private:
            raise InputError(
                f"'{key}' is shared but is the same tensor as the private '{private[id(tensors[key])]}'; make both private"
            )


def _clone(state: Mapping[str, Tensor], keys: tuple[str, ...]) -> Tensors:
    return {key: state[key].detach().to("cpu", copy=True) for key in keys}
