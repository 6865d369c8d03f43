"""Where a participant of FLARE keeps its files of runs."""

import os
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey, WorkspaceConstants
from nvflare.apis.fl_context import FLContext

from feddp.flare.kept import kept_below

SIMULATED_FILES = "FEDDP_SIMULATED_FILES"  # environment variable: the folder of all participants' files in the simulator


def kept(fl_ctx: FLContext) -> Path:
    """Returns this site's folder of all runs' files and of the files kept across runs. No server reads it."""
    return kept_by(fl_ctx.get_identity_name(), fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())


def kept_by(participant: str, workspace: str) -> Path:
    """Returns a participant's folder of all runs' files.

    It lies in the participant's workspace. In a container, whose workspace ends with the job, it lies in FLARE's
    NVFL_RESULT_ROOT. The simulator, which empties its workspace at every start, gives a folder in SIMULATED_FILES.
    """
    if SIMULATED_FILES in os.environ:
        return kept_below(Path(os.environ[SIMULATED_FILES]) / participant)
    return kept_below(Path(os.environ.get(WorkspaceConstants.ENV_VAR_RESULT_ROOT) or workspace))
