"""The longest files of tests, which start first: a worker takes whole files, and a long one at the end leaves a core idle.

About the order of their CPU time (2026-11-27, with that of the processes that each starts), but federations and files that
compute take turns: where the federations came first, a site in FLARE's simulator was not heard for a minute (one run).
"""

LONGEST = (
    "federation/test_deployment.py",
    "integration/test_methods.py",
    "integration/test_golden.py",
    "federation/test_slow_line.py",
    "federation/test_poc.py",
    "federation/test_docs_commands.py",
    "unit/training/test_pretended_gpu.py",
    "federation/test_simulator.py",
    "integration/test_onnx.py",
    "federation/test_gate_deployment.py",
    "federation/test_bench_poc.py",
    "integration/test_bench.py",
    "federation/test_chaos.py",
    "federation/test_environments.py",
    "integration/test_dials.py",
    "federation/test_own_keys.py",
    "federation/test_compare.py",
    "integration/test_workers.py",
    "federation/test_new_stage.py",
    "unit/stages/test_resume.py",
    "federation/test_sbom.py",
    "integration/test_sealed_stage.py",
    "unit/test_lean.py",
)
