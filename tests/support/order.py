"""The longest files of tests, which start first: a worker takes whole files, and a long one at the end leaves a core idle.

Their order is that of their CPU time, estimated on 2026-11-27 from what each starts and trains.
"""

LONGEST = (
    "federation/test_deployment.py",
    "integration/test_methods.py",
    "integration/test_golden.py",
    "federation/test_docs_commands.py",
    "unit/training/test_pretended_gpu.py",
    "federation/test_simulator.py",
    "federation/test_bench_poc.py",
    "integration/test_bench.py",
    "federation/test_chaos.py",
    "federation/test_gate_deployment.py",
    "federation/test_environments.py",
    "federation/test_compare.py",
    "federation/test_poc.py",
    "federation/test_provisioning.py",
    "federation/test_own_keys.py",
    "unit/test_lean.py",
    "integration/test_onnx.py",
    "integration/test_workers.py",
    "unit/stages/test_resume.py",
    "integration/test_dials.py",
)
