"""The longest files of tests, which start first: a worker takes whole files, and a long one at the end leaves a core idle.

Their order is that of their CPU time, measured on 2026-11-27, with that of the processes that each starts.
"""

LONGEST = (
    "federation/test_deployment.py",
    "federation/test_simulator.py",
    "federation/test_docs_commands.py",
    "federation/test_bench_poc.py",
    "federation/test_environments.py",
    "federation/test_chaos.py",
    "federation/test_poc.py",
    "federation/test_own_keys.py",
    "federation/test_gate_deployment.py",
    "integration/test_bench.py",
    "unit/training/test_pretended_gpu.py",
    "integration/test_methods.py",
    "integration/test_onnx.py",
    "unit/stages/test_resume.py",
    "federation/test_compare.py",
    "integration/test_golden.py",
    "integration/test_workers.py",
    "unit/test_lean.py",
    "integration/test_dials.py",
    "federation/test_new_stage.py",
)
