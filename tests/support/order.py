"""The longest files of tests, which start first: a worker takes whole files, and a long one at the end leaves a core idle.

Their order is that of their CPU time, estimated on 2026-11-27 from what each starts and trains.
"""

LONGEST = (
    *("test_deployment", "test_methods", "test_golden", "test_docs_commands", "test_pretended_gpu", "test_simulator"),
    *("test_bench_poc", "test_bench", "test_chaos", "test_gate_deployment", "test_environments", "test_compare", "test_poc"),
    *("test_provisioning", "test_own_keys", "test_lean", "test_onnx", "test_workers", "test_resume", "test_dials"),
)
