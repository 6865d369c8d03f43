"""`feddp adapt`, `feddp job-outside`, which exports the same as a FLARE job, and `feddp join`."""

from pathlib import Path
from typing import Annotated

import typer

from feddp.adaptation.choices import ROUTING, Settings
from feddp.cli.options import Device, Models, Scope, Seed, Strategy, words
from feddp.terminal import note, say

USUAL = Settings()


def adapt(
    models: Models,
    images: Annotated[Path, typer.Option(help="A site's folder (its images of split test), or a folder of PNGs.")],
    out: Annotated[Path, typer.Option(help="Where the masks go, under the images' names; a new folder.")],
    how: Strategy = ROUTING,
    epochs: Annotated[int, typer.Option(help="Passes over the images, at most (routing, tent, ttt); 0: none.")] = USUAL.epochs,
    lr: Annotated[float, typer.Option(help="Adam's learning rate (routing, tent, ttt).")] = USUAL.lr,
    beta: Annotated[float, typer.Option(help="Weight of the shape loss (routing); 0 leaves it out.")] = USUAL.beta,
    noise: Annotated[
        float, typer.Option(help="Standard deviation of the consistency loss's noise; 0: no such loss.")
    ] = USUAL.noise,
    neighbourhood: Annotated[
        int, typer.Option(help="Pixels on either side that the shape loss looks at (routing).")
    ] = USUAL.neighbourhood,
    mix: Annotated[str, typer.Option(help="sigmoid or softmax, over the models (routing).")] = USUAL.mix,
    norm: Annotated[str, typer.Option(help="mean: the models' normalisations; batch: the images' own (routing).")] = USUAL.norm,
    batch: Annotated[int, typer.Option(help="Images per step.")] = USUAL.batch,
    seed: Seed = USUAL.seed,
    device: Device = "cpu",
    score: Annotated[bool, typer.Option("--score", help="Measure afterwards, against the site's masks.")] = False,
) -> None:
    """Adapt the models of a finished run to images without labels, and write a mask for every image."""
    from feddp.adaptation import unseen_site
    from feddp.adaptation.choices import AdaptationOptions
    from feddp.adaptation.models import read_models
    from feddp.reading import counted
    from feddp.reporting.tables import Value
    from feddp.training.columns import METRICS, class_names, of_class
    from feddp.training.device import asked_for

    def report(epoch: int, loss: float) -> None:
        note(f"epoch {epoch}/{epochs}  unsupervised loss: {loss:.6f}")

    request = AdaptationOptions(how, Settings(epochs, lr, beta, noise, neighbourhood, mix, norm, batch, seed), score)
    where = asked_for(device)
    done = unseen_site.adapt(read_models(models), str(models), images, out, request, where, report)
    kept = "" if done["kept_epoch"] is None else f", epoch {done['kept_epoch']} of {epochs} kept"
    say(f"{counted(done['images'], 'mask')} in {out} ({how}{kept}; {done['seconds_per_image']:.2f} s an image)")
    if done["losses"] and (trained := len(done["losses"]) - 1) < epochs:
        note(
            f"warning: the unsupervised loss stands still at {done['losses'][-1]:.6f}, so the adaptation ended after epoch"
            f" {trained} of {epochs}: the models may hardly differ; compare --how average"
        )
    if done["empty_masks"] == done["images"]:
        why = (
            "the unsupervised loss may be lowest there: compare --how average" if done["losses"] else "the models found nothing"
        )
        mixed = ", or --mix softmax" if how == ROUTING and mix != "softmax" else ""
        note(f"every mask is empty; {why}{mixed}")
    if score:
        scores = {name: Value(cell["mean"], cell["std"] if cell["n"] > 1 else None, 4) for name, cell in done["scores"].items()}
        for name in ("", *class_names(scores)):
            say("; ".join(f"{of_class(metric, name)} {scores[of_class(metric, name)]}" for metric in METRICS))


def job_outside(
    run: Annotated[Path, typer.Option(help="The finished run's folder: --out of `feddp run`, or what download_job brought.")],
    newcomer: Annotated[str, typer.Option(help="The unseen site: its name in the federation.")],
    out: Annotated[Path, typer.Option(help="The job folder to write; its name is the job's.")],
    donors: Annotated[
        str | None, typer.Option(help="The sites whose models it receives, comma-separated; default: all of the run.")
    ] = None,
    job_id: Annotated[str | None, typer.Option(help="The finished run's job id; default: the one in its results.json.")] = None,
    how: Strategy = ROUTING,
    settings: Annotated[list[str], typer.Option("--set", help="key=value: an option of `feddp adapt`.")] = [],  # noqa: B006
    score: Annotated[bool, typer.Option("--score", help="Measure afterwards, against the unseen site's masks.")] = False,
    scope: Scope = "feddp",
) -> None:
    """Export `feddp adapt` as a job: consenting sites of a finished run give their models to a site that has joined since."""
    from feddp.jobs.adaptation import export

    names = None if donors is None else list(words(donors))
    say(export(run, newcomer, names, out, how, settings, score, job_id, scope))


def join(
    models: Models,
    data: Annotated[Path, typer.Option(help="The new site's folder, with masks.")],
    out: Annotated[Path, typer.Option(help="A new folder for its network and its results.")],
    train: Annotated[str, typer.Option(help="The roles that are tuned, comma-separated; the rest is frozen.")] = "decoder,head",
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 20,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 1e-4,
    seed: Annotated[int, typer.Option(min=0, help="The tuning's random draws come from it.")] = 0,
    device: Device = "cpu",
) -> None:
    """Tune the network of a federation at a site that was not in it but has masks; the encoder stays unchanged."""
    from feddp.reporting.page import table
    from feddp.reporting.screen import show
    from feddp.run.join import join as run

    def report(epoch: int, loss: float, score: float) -> None:
        note(f"epoch {epoch}/{epochs}  loss: {loss:.4f}  validation IoU: {score:.4f}")

    show(table(run(models, data, out, words(train), epochs, lr, seed, device, report)))
