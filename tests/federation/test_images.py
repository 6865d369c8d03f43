"""Site images: what is written for Docker and Kubernetes is linted, rendered, held against schemas, shown to FLARE's launchers.

No engine and no cluster is at hand: no image is built here, no container started.
"""

import importlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import kubernetes_validate
import pytest
import yaml
from docker.types import DeviceRequest
from docker.utils.build import exclude_paths
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.apis.workspace import Workspace
from nvflare.app_opt.job_launcher import k8s_launcher
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.security.security import FLAuthorizer
from nvflare.tool.deploy.deploy_commands import prepare_deployment
from typer.testing import CliRunner

from feddp.cli import app
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.flare.kept import files_of
from feddp.flare.pods import CONTAINER, restrict_pods
from feddp.flare.workspace import kept
from support import ROOT
from support.site import FlareSite

pytestmark = pytest.mark.tools

IMAGES = ROOT / "provisioning" / "images"
IMAGE = "registry.example.org/feddp:0.1.0"
SERVER, HOSPITAL = "server.example.org", "hospital-a"
KUBERNETES = "1.32"
YAMLLINT = {"extends": "default", "rules": {"line-length": {"max": 140}, "document-start": "disable", "comments": "disable"}}
RELEASE = ["--namespace", "feddp", "--set", "name=feddp-server", "--set", "service.type=LoadBalancer"]


def tool(name: str, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess:
    """A linter of requirements.txt, from this environment."""
    command = [str(Path(sys.executable).parent / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})


@pytest.fixture(scope="module")
def kits(tmp_path_factory, tiny_root):
    """The server's and hospital-a's kit: as provisioned, and prepared for either runtime as docs/how-to/containers.md says."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "kept").mkdir()
    project = folder / "project.yml"
    project.write_text((ROOT / "provisioning/project.yml").read_text())
    done = tool("nvflare", "provision", "-p", project, "-w", folder / "kits")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "kits/feddp/prod_00").rename(folder / "plain")
    for runtime in ("docker", "kubernetes"):
        for name in (SERVER, HOSPITAL):
            prepare(folder / "plain" / name, folder / runtime / name, runtime)
            ours = f"{'server' if name == SERVER else 'hospital'}.{runtime}.yml"
            text = (IMAGES / ours).read_text().replace(": /data/site", f": {tiny_root / 'site-1'}")
            text = text.replace(": /data/kept", f": {folder / 'kept'}")
            (folder / runtime / name / "local/study_runtime.yaml").write_text(text)
            for template in (IMAGES / "chart").iterdir() if runtime == "kubernetes" else ():
                shutil.copy(template, folder / runtime / name / "helm_chart/templates")
        privacy = folder / runtime / HOSPITAL / "local/privacy.json"
        privacy.write_text(privacy.read_text().replace('"/data/site"', '"/data/default/site"'))
    return folder


def prepare(kit: Path, output: Path, runtime: str) -> None:
    """`nvflare deploy prepare`, in this process."""
    prepare_deployment(SimpleNamespace(kit=str(kit), output=str(output), config=str(IMAGES / f"{runtime}.yml")))


def said(kit: Path) -> list[str]:
    return CliRunner().invoke(app, ["kit", "check", "--offline", str(kit)]).output.splitlines()


def resources(kit: Path) -> dict:
    return json.loads((kit / "local/resources.json.default").read_text())


# --- the Dockerfile and what it may see ------------------------------------------------------------------------------


def test_the_dockerfile_is_linted(tmp_path):
    assert tool("hadolint", IMAGES / "Dockerfile").stdout == ""
    spoilt = tmp_path / "Dockerfile"
    spoilt.write_text((IMAGES / "Dockerfile").read_text().replace("FROM ${BASE}", "FROM python") + "USER root\n")
    assert {"DL3006", "DL3002"} <= set(re.findall(r"DL\d+", tool("hadolint", spoilt).stdout)), "the control"


def test_who_runs_it_is_nobody_in_particular():
    """The last user is not root; the pods' user is the image's."""
    user = re.findall(r"^USER (\S+)", (IMAGES / "Dockerfile").read_text(), re.MULTILINE)[-1]
    config = yaml.safe_load((IMAGES / "kubernetes.yml").read_text())
    contexts = [config["parent"]["pod_security_context"], config["job_launcher"]["job_pod_security_context"]]
    assert [(c["runAsUser"], c["runAsNonRoot"]) for c in contexts] == [(int(user), True)] * 2 != [(0, True)] * 2


@pytest.mark.parametrize("kind", ["hospital", "server"])
def test_dockers_containers_of_jobs_have_no_rights_to_gain(kind):
    """At the server too, where what every site sends is read."""
    study = yaml.safe_load((IMAGES / f"{kind}.docker.yml").read_text())["studies"]["default"]
    given = study.get("docker_kwargs", {})
    assert (given.get("cap_drop"), given.get("security_opt")) == (["ALL"], ["no-new-privileges"])


def test_only_the_package_enters_the_build(tmp_path):
    """By the Docker SDK's own reading of .dockerignore, on a checkout with kits, keys, images and runs in it."""
    inside = ["pyproject.toml", "provisioning/requirements.lock", "custom/feddp/cli/run.py", "custom/feddp/kit/kit.py"]
    outside = [
        "provisioning/kits/feddp/state/cert.json",
        "provisioning/docker/hospital-a/startup/client.key",
        "data/a/images/1.png",
    ]
    outside += [
        "runs/x/network.safetensors",
        ".venv/ready",
        ".git/config",
        "custom/feddp/__pycache__/cli.pyc",
        "docs/x.md",
    ]
    for name in inside + outside:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def sent(patterns):
        return {path for path in exclude_paths(str(tmp_path), list(patterns)) if (tmp_path / path).is_file()}

    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert sent(rules) - {"Dockerfile", ".dockerignore"} == set(inside)
    assert sent([]) == {*inside, *outside}, "the control"
    copied = re.findall(r"^COPY (.*) \S+$", (IMAGES / "Dockerfile").read_text(), re.MULTILINE)
    assert {f"!{source}" for line in copied for source in line.split()} == {rule for rule in rules if rule[0] == "!"}


# --- what deploy prepare does to a kit -------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["docker", "kubernetes"])
def test_our_policy_outlives_it(kits, runtime):
    """Of resources.json launcher, resource manager and the server's storage change; rights and guard are as they were."""
    for name, classes in ((SERVER, SERVER_CLASSES), (HOSPITAL, SITE_CLASSES)):
        before, after = resources(kits / "plain" / name), resources(kits / runtime / name)
        components = {c["path"].rsplit(".", 1)[-1] for c in after.pop("components")}
        before_components = {c["path"].rsplit(".", 1)[-1] for c in before.pop("components")}
        for said in (before, after):
            said.pop("snapshot_persistor", None)  # the server's: where it stores
        assert after == before
        assert after["class_allow_list"] == sorted(classes.values())
        kind, short = ("Server" if name == SERVER else "Client"), ("Docker" if runtime == "docker" else "K8s")
        assert components - before_components <= {f"{kind}{short}JobLauncher", "PassthroughResourceManager"}
        assert f"{kind}{short}JobLauncher" in components
        rights = "local/authorization.json.default"
        assert (kits / "plain" / name / rights).read_bytes() == (kits / runtime / name / rights).read_bytes()
    scope = json.loads((kits / runtime / HOSPITAL / "local/privacy.json").read_text())["scopes"][0]
    assert scope["task_result_filters"] == [{"path": "feddp.flare.filters.PrivateTensorGuard", "args": {}}]


@pytest.mark.parametrize("runtime", ["docker", "kubernetes"])
@pytest.mark.parametrize("name", [SERVER, HOSPITAL])
def test_its_containers_too_connect_with_certificates(kits, runtime, name):
    """Beside our settings of streams, and at a host of the containers' network, which is not the machine alone."""
    before, after = (json.loads((kits / kind / name / "local/comm_config.json").read_text()) for kind in ("plain", runtime))
    resources = after["internal"].pop("resources")
    assert before["internal"].pop("resources") == {"host": "localhost", "connection_security": "mtls"}
    assert (resources["connection_security"], resources["host"] == "localhost") == ("mtls", False)
    assert before == after


def test_it_deletes_a_hospitals_own_resources(kits, tmp_path):
    """FLARE 2.9's doing, which the docs warn of."""
    kit = Path(shutil.copytree(kits / "plain" / HOSPITAL, tmp_path / "kit"))
    own = resources(kit) | {"class_allow_list": []}
    (kit / "local/resources.json").write_text(json.dumps(own))
    prepare(kit, tmp_path / "prepared", "docker")
    assert not (tmp_path / "prepared/local/resources.json").exists()
    assert resources(tmp_path / "prepared")["class_allow_list"] == sorted(SITE_CLASSES.values())


def test_a_prepared_kit_may_start(kits):
    unseen = "; its data, in a volume of the cluster, were not checked"
    for runtime, note in (("docker", ""), ("kubernetes", unseen)):
        assert said(kits / runtime / SERVER)[0].endswith("may start")
        assert said(kits / runtime / HOSPITAL)[0].endswith(f"hospital-a of project feddp may start{note}")


@pytest.fixture
def spoil(kits, tmp_path):
    """A copy of hospital-a's Docker kit with one file changed, and what is said of it."""

    def changed(name, change):
        kit = Path(shutil.copytree(kits / "docker" / HOSPITAL, tmp_path / "kit"))
        path = kit / "local" / name
        content = yaml.safe_load(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        return said(kit)

    return changed


def study(change):
    return lambda content: change(content["studies"]["default"])


def launcher(**args):
    return lambda content: next(c for c in content["components"] if c["id"] == "docker_launcher")["args"].update(args)


SECRET = {"x": {"source": "/x", "mount_path": "/usr/local/lib/python3.11"}}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("study_runtime.yaml", study(lambda s: s.pop("container")), "names no image for jobs"),
        (
            "study_runtime.yaml",
            study(lambda s: s.pop("env")),
            "NVFL_RESULT_ROOT is None, which is not a dataset mounted for writing",
        ),
        ("study_runtime.yaml", study(lambda s: s["datasets"]["kept"].update(mode="ro")), "not a dataset mounted for writing"),
        ("study_runtime.yaml", study(lambda s: s["datasets"]["kept"].update(source="/nowhere")), "/nowhere: is not a folder"),
        ("study_runtime.yaml", study(lambda s: s["datasets"]["site"].update(source="/nowhere")), "is not a site's folder"),
        (
            "study_runtime.yaml",
            study(lambda s: s["datasets"].pop("site")),
            "does not mount /data/default/site, which privacy.json",
        ),
        ("study_runtime.yaml", study(lambda s: s.update(pod_template={})), "is not accepted by FLARE"),
        ("study_runtime.yaml", study(lambda s: s["env"].update(LD_PRELOAD="/x.so")), "gives containers LD_PRELOAD, which"),
        (
            "study_runtime.yaml",
            study(lambda s: s["docker_kwargs"].update(privileged=True)),
            "gives containers privileged, which",
        ),
        (
            "study_runtime.yaml",
            study(lambda s: s["docker_kwargs"].update(security_opt=["seccomp=unconfined"])),
            "gives containers security_opt ['seccomp=unconfined']. Allowed are no-new-privileges",
        ),
        ("study_runtime.yaml", study(lambda s: s["datasets"]["site"].update(mode="rw")), "for writing, which is not the"),
        (
            "study_runtime.yaml",
            study(lambda s: s["datasets"].update(more={"source": "/", "mode": "ro"})),
            "mounts /, which gives jobs access to the machine",
        ),
        ("study_runtime.yaml", study(lambda s: s.update(secret_mounts=SECRET)), "a pod template or secrets, which the check"),
        (
            "study_runtime.yaml",
            lambda content: content["studies"].update(other={"env": {"PYTHONSTARTUP": "/x.py"}}),
            "gives containers PYTHONSTARTUP, which",
        ),
        ("resources.json.default", launcher(default_python_path="/data/python"), "starts jobs with '/data/python'"),
        ("resources.json.default", launcher(default_job_env={"LD_PRELOAD": "/x.so"}), "gives containers LD_PRELOAD, which"),
        ("comm_config.json", lambda c: c.update(comm_driver_path="/data"), "has comm_driver_path, which no kit has"),
        (
            "comm_config.json",
            lambda c: c["internal"]["resources"].update(connection_security="clear"),
            "(`internal` is 'tcp with connection_security clear'). Prepare the kit again with `nvflare deploy prepare`",
        ),
        ("privacy.json", lambda p: p["scopes"][0]["properties"].update(data="/data/site"), "does not mount /data/site"),
        ("privacy.json", lambda p: p["scopes"][0].pop("task_result_filters"), "does not apply the guard"),
        (
            "resources.json.default",
            lambda r: r["class_allow_list"].append("nvflare"),
            "allows nvflare, which is not a reviewed",
        ),
        ("resources.json.default", lambda r: r.update(allow_log_streaming=True), "lets jobs stream the site's log"),
    ],
)
def test_a_prepared_kit_below_the_minimum_is_one_line(spoil, name, change, words):
    (line,) = spoil(name, change)
    assert words in line
    assert line.endswith(".")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("env"), "NVFL_RESULT_ROOT is None, which is not a dataset mounted for writing"),
        (lambda s: s["datasets"]["kept"].update(source="/nowhere"), "/nowhere: is not a folder, but jobs write there"),
        (
            lambda s: s["datasets"]["kept"].update(source="/tmp"),
            "/tmp: can be changed by all users of this machine (mode 1777)",
        ),
    ],
)
def test_a_server_s_kit_too_names_a_folder_that_outlives_its_jobs(kits, tmp_path, change, words):
    """Else no run could be continued: of a job's workspace FLARE keeps the job's own run folder alone."""
    kit = Path(shutil.copytree(kits / "docker" / SERVER, tmp_path / "kit"))
    path = kit / "local/study_runtime.yaml"
    content = yaml.safe_load(path.read_text())
    study(change)(content)
    path.write_text(json.dumps(content))
    (line,) = said(kit)
    assert words in line


def test_a_changed_start_script_is_found(kits, tmp_path):
    """Another image is the site's own business; what is started in it is not."""
    kit = Path(shutil.copytree(kits / "docker" / HOSPITAL, tmp_path / "kit"))
    path = kit / "startup/start_docker.sh"
    script = path.read_text()
    path.write_text(script.replace(IMAGE, "registry.example.org/other:1"))
    assert said(kit)[0].endswith("may start")
    for old, new in (("--rm ", "--rm --privileged "), ("client_train", "x"), (f'"{IMAGE}"', '"$(id)"')):
        assert old in script
        path.write_text(script.replace(old, new))
        assert said(kit)[0].startswith(f"{path}: differs from the script of FLARE's templates")


def test_a_sites_files_lie_where_its_container_keeps_them(monkeypatch, plan_for, tmp_path):
    fl_ctx = FlareSite(plan_for(), tmp_path / "workspace").fl_ctx
    assert files_of(kept(fl_ctx), "job") == tmp_path / "workspace/feddp/job"
    given = yaml.safe_load((IMAGES / "hospital.docker.yml").read_text())["studies"]["default"]["env"]
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert files_of(kept(fl_ctx), "job") == Path("/data/default/kept/feddp/job")


@pytest.mark.parametrize("runtime", ["docker", "k8s"])
def test_a_job_with_an_image_of_its_own_brings_code(kits, monkeypatch, runtime):
    """As a site decides when a job is deployed to it, under the rights of the kit."""
    rights = json.loads((kits / "docker" / HOSPITAL / "local/authorization.json.default").read_text())
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("hospital_a", rights))

    def answer(spec):
        meta = {"launcher_spec": {HOSPITAL: {runtime: spec}}}
        info = AppAuthzService.derive_local_app_info({}, meta, HOSPITAL)
        return AppAuthzService.authorize_app_info(info, "lead@consortium.org", "consortium", "lead", meta)

    assert answer({"num_of_gpus": 1}) == (True, ""), "the control"
    assert answer({"image": "docker.io/eve/x"}) == (False, "BYOC not permitted")
    assert answer({"python_path": "/data/default/kept/x"}) == (False, "BYOC not permitted")


# --- what a job's container would be ---------------------------------------------------------------------------------


def launcher(kit: Path, **more):
    """The launcher of a prepared kit, as FLARE builds it from resources.json."""
    (component,) = [c for c in resources(kit)["components"] if c["id"].endswith("_launcher")]
    module, name = component["path"].rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(**component["args"], **more)


def launching(kit: Path) -> FLContext:
    """What a launcher asks of FLARE's context."""
    fl_ctx = FLContext()
    fl_ctx.get_identity_name = lambda *a, **k: HOSPITAL
    cell = SimpleNamespace(get_fqcn=lambda: HOSPITAL, register_request_cb=lambda **k: None)
    fl_ctx.get_engine = lambda *a, **k: SimpleNamespace(cell=cell)
    arguments = {JobProcessArgs.EXE_MODULE: ("-m", "nvflare.private.fed.app.client.worker_process")}
    for key, value in (
        (FLContextKey.JOB_PROCESS_ARGS, arguments),
        (FLContextKey.WORKSPACE_OBJECT, Workspace(str(kit), HOSPITAL)),
        (FLContextKey.ARGS, SimpleNamespace(workspace=str(kit), set=None)),
    ):
        fl_ctx.set_prop(key, value, private=True, sticky=False)
    return fl_ctx


JOB = {"job_id": "0f1e2d3c", "study": "default", "resource_spec": {}}
ASKING = JOB | {"resource_spec": {HOSPITAL: {"num_of_gpus": 2}}}


def test_docker_is_asked_for_our_image_the_sites_folders_and_its_gpu(kits, tmp_path, tiny_root):
    """For a job of ours, with its empty resource_spec; FLARE's launcher, and a stand-in for the engine."""
    kit = Path(shutil.copytree(kits / "docker" / HOSPITAL, tmp_path / "kit"))
    asked = []

    class Containers:
        def run(self, image, **options):
            asked.append((image, options))
            return SimpleNamespace(id="c", wait=lambda: {"StatusCode": 0})

        def get(self, _):
            return SimpleNamespace(status="running")

    docker = launcher(kit, workspace=str(kit))
    docker.WORKSPACE_MOUNT = str(kit)  # on this machine the kit does not lie where a container would see it
    docker._docker_client = SimpleNamespace(containers=Containers())
    for job in (JOB, ASKING):
        docker.launch_job(dict(job), launching(kit))
    (image, options), (_, more) = asked
    assert image == IMAGE
    mounts = {m["Target"]: (m["Source"], m["ReadOnly"]) for m in options["mounts"]}
    assert mounts.pop("/data/default/site") == (str(tiny_root / "site-1"), True)
    assert mounts.pop("/data/default/kept") == (str(kits / "kept"), False)
    inside = {str(Path(target).relative_to(kit)): read_only for target, (_, read_only) in mounts.items()}
    assert inside == {".": False, "startup": True, "local": True, JOB["job_id"]: False}, "the engine's socket is not there"
    assert options["environment"]["NVFL_RESULT_ROOT"] == "/data/default/kept"
    assert (options["cap_drop"], options["security_opt"]) == (["ALL"], ["no-new-privileges"])
    gpus = [DeviceRequest(**o["device_requests"][0]) for o in (options, more)]
    assert [(gpu["Count"], gpu["Capabilities"]) for gpu in gpus] == [(1, [["gpu"]]), (2, [["gpu"]])]


def test_kubernetes_is_asked_for_our_image_the_sites_volumes_and_the_jobs_gpu(kits, tmp_path):
    kit = Path(shutil.copytree(kits / "kubernetes" / HOSPITAL, tmp_path / "kit"))
    asked = []

    class Cluster:
        def create_namespaced_secret(self, namespace, body):
            kubernetes_validate.validate(body, KUBERNETES, strict=True)

        def create_namespaced_pod(self, body, namespace):
            asked.append((namespace, body))
            return SimpleNamespace(metadata=SimpleNamespace(uid="1"))

        def patch_namespaced_secret(self, name, namespace, body):
            pass

        def read_namespaced_pod(self, name, namespace):
            return SimpleNamespace(status=SimpleNamespace(phase="Running"))

    restrict_pods()
    kubernetes = launcher(kit)
    kubernetes.core_v1 = Cluster()
    for job in (JOB, ASKING):
        kubernetes.launch_job(dict(job), launching(kit))
    (namespace, pod), (_, more) = asked
    assert namespace == "feddp"
    assert_valid(pod)
    (container,) = pod["spec"]["containers"]
    assert container["image"] == IMAGE
    claims = {
        v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v
    }
    mounts = {m["mountPath"]: (claims[m["name"]], m["readOnly"]) for m in container["volumeMounts"] if m["name"] in claims}
    assert mounts == {"/data/default/site": ("feddp-site", True), "/data/default/kept": ("feddp-kept", False)}
    assert {"name": "NVFL_RESULT_ROOT", "value": "/data/default/kept"} in container["env"]
    user = {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001}
    assert pod["spec"]["securityContext"] == user | {"seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert container["securityContext"] == CONTAINER
    gpus = [p["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for p in (pod, more)]
    assert gpus == [None, 2]


# --- scripts, files and charts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SERVER, HOSPITAL])
def test_the_start_scripts_are_linted(kits, tmp_path, name):
    script = kits / "docker" / name / "startup/start_docker.sh"
    assert script.stat().st_mode & stat.S_IXUSR
    assert IMAGE in script.read_text()
    assert tool("shellcheck", script).stdout == ""
    spoilt = tmp_path / "start_docker.sh"
    spoilt.write_text(script.read_text().replace('"$HOST_WORKSPACE/daemon_pid.fl"', "$HOST_WORKSPACE/daemon_pid.fl"))
    assert "SC2086" in tool("shellcheck", spoilt).stdout, "the control"


def test_the_yaml_is_linted(kits, tmp_path):
    ours = sorted((ROOT / "provisioning").rglob("*.yml"))
    assert len(ours) >= 5
    done = tool("yamllint", "-d", yaml.safe_dump(YAMLLINT), *ours)
    assert done.stdout == ""
    spoilt = tmp_path / "docker.yml"
    spoilt.write_text((IMAGES / "docker.yml").read_text() + "runtime: k8s\n")
    assert "duplication of key" in tool("yamllint", "-d", yaml.safe_dump(YAMLLINT), spoilt).stdout, "the control"


def rendered(chart: Path, *options: str) -> list[dict]:
    """The manifests that `helm upgrade --install` would send."""
    done = tool("helm", "template", "release", chart, *options)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def assert_valid(manifest: dict) -> None:
    """Kubernetes' schema; and its rule for a container's name, which is in no schema: a DNS label, so no dots."""
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    pod = manifest["spec"].get("template", manifest)["spec"] if manifest["kind"] in ("Deployment", "Pod") else {}
    for container in pod.get("containers", []):
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", container["name"]), container["name"]


@pytest.mark.parametrize(("name", "options"), [(SERVER, RELEASE), (HOSPITAL, RELEASE[:2])])
def test_the_charts_render_to_valid_manifests(kits, name, options):
    chart = kits / "kubernetes" / name / "helm_chart"
    linted = tool("helm", "lint", "--strict", chart)
    assert linted.returncode == 0, linted.stdout
    manifests = rendered(chart, *options)
    kinds = ["Deployment", "NetworkPolicy", "NetworkPolicy", "Role", "RoleBinding", "Service", "ServiceAccount"]
    assert sorted(m["kind"] for m in manifests) == kinds
    for manifest in manifests:
        assert_valid(manifest)
    (deployment,) = [m for m in manifests if m["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == IMAGE
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"]] == ["feddp-workspace"]
    (service,) = [m for m in manifests if m["kind"] == "Service"]
    assert service["spec"].get("type") == ("LoadBalancer" if name == SERVER else None)


CALLS = re.compile(r"self\.(?:core_v1|api_instance)\.(\w+?)_namespaced_(\w+)\(")
VERBS = {"read": "get", "replace": "update"}


@pytest.mark.parametrize("name", [SERVER, HOSPITAL])
def test_the_role_has_what_the_launcher_calls_and_no_more(kits, name):
    """FLARE's own role reads every secret of the namespace, the control."""
    calls = {(f"{what}s", VERBS.get(verb, verb)) for verb, what in CALLS.findall(Path(k8s_launcher.__file__).read_text())}
    calls.add(("pods", "get"))  # ours: `feddp.flare.endings`
    chart = kits / "kubernetes" / name / "helm_chart"
    (role,) = [m for m in rendered(chart, *RELEASE) if m["kind"] == "Role"]
    rules = {(what, verb) for rule in role["rules"] for what in rule["resources"] for verb in rule["verbs"]}
    assert rules == calls
    assert ("secrets", "get") not in rules
    flares = Path(k8s_launcher.__file__).parents[2] / "tool/deploy/templates/helm/client/role.yaml"
    assert '"secrets"' in flares.read_text()
    assert '"get", "update"' in flares.read_text()


def ports(rules: list[dict]) -> set[int]:
    return {port["port"] for rule in rules for port in rule["ports"]}


@pytest.mark.parametrize("name", [SERVER, HOSPITAL])
def test_pods_reach_and_are_reached_by_whom_they_need_alone(kits, name):
    """Ports of project.yml: 8002 sites, 8003 people; 8102 is FLARE's for a participant's own jobs."""
    more = ["--set", "serverCidr=192.0.2.1/32", "--set", "apiCidr=198.51.100.0/24"]
    manifests = rendered(kits / "kubernetes" / name / "helm_chart", *RELEASE, *more)
    policies = {m["metadata"]["name"].rsplit("-", 1)[1]: m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"}
    (deployment,) = [m for m in manifests if m["kind"] == "Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    pods, parent = policies["pods"], policies["parent"]
    assert pods["podSelector"] == {}, "of jobs too, which have no labels"
    assert parent["podSelector"]["matchLabels"].items() <= labels.items()
    assert all(policy["policyTypes"] == ["Ingress", "Egress"] for policy in policies.values())
    assert "ingress" not in pods, "nobody connects to a job"
    assert ports(parent["ingress"]) == {8102} | ({8002, 8003} if name == SERVER else set())
    (jobs,) = [rule for rule in parent["ingress"] if ports([rule]) == {8102}]
    assert jobs["from"] == [{"podSelector": {}}]
    assert ports(pods["egress"]) == {53, 8102} | ({8002} if name == HOSPITAL else set())
    assert ports(parent["egress"]) == {443, 6443}
    assert parent["egress"][0]["to"] == [{"ipBlock": {"cidr": "198.51.100.0/24"}}]
    if name == HOSPITAL:
        (server,) = [rule for rule in pods["egress"] if ports([rule]) == {8002}]
        assert server["to"] == [{"ipBlock": {"cidr": "192.0.2.1/32"}}]


def test_the_validators_find_a_spoilt_chart(kits, tmp_path):
    """The controls of the test above; and FLARE's own chart of a server with a host name for a name."""
    chart = kits / "kubernetes" / SERVER / "helm_chart"
    with pytest.raises(AssertionError, match=re.escape(SERVER)):
        assert_valid(next(m for m in rendered(chart) if m["kind"] == "Deployment"))
    spoilt = Path(shutil.copytree(chart, tmp_path / "chart"))
    template = spoilt / "templates/server-deployment.yaml"
    template.write_text(template.read_text().replace("replicas: 1", "replicas: one"))
    with pytest.raises(kubernetes_validate.ValidationError, match="'one' is not of type"):
        assert_valid(next(m for m in rendered(spoilt, *RELEASE) if m["kind"] == "Deployment"))
    template.write_text("{{ .Values.name ")
    assert tool("helm", "lint", "--strict", spoilt).returncode != 0


def test_staging_puts_kit_and_policy_into_the_cluster(kits, tmp_path):
    """`nvflare deploy k8s stage` with a stand-in for kubectl: what it would apply, and the chart that mounts it."""
    kit = Path(shutil.copytree(kits / "kubernetes" / HOSPITAL, tmp_path / "kit"))
    kubectl = tmp_path / "bin/kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(f"#!/bin/sh\necho --- >>{tmp_path}/applied\ncat >>{tmp_path}/applied\n")
    kubectl.chmod(0o755)
    done = tool("nvflare", "deploy", "k8s", "stage", kit, PATH=f"{kubectl.parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    applied = [m for m in yaml.safe_load_all((tmp_path / "applied").read_text()) if m]
    for manifest in applied:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    policy, secret = ({key.split("-", 2)[2] for key in m.get("binaryData", m.get("data"))} for m in applied)
    assert [m["kind"] for m in applied] == ["ConfigMap", "Secret"]
    assert {"privacy.json", "resources.json.default", "authorization.json.default", "study_runtime.yaml"} <= policy
    assert {"client.key", "client.crt", "rootCA.pem", "fed_client.json"} == secret
    (deployment,) = [m for m in rendered(kit / "helm_chart") if m["kind"] == "Deployment"]
    assert_valid(deployment)
    mounts = {m["mountPath"].rsplit("/", 1)[-1]: m.get("readOnly") for m in spec_of(deployment)["volumeMounts"]}
    assert mounts == {"workspace": None, "local": True, "startup": True}


def spec_of(deployment: dict) -> dict:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container
