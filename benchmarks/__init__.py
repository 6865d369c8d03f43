"""Benchmarks of FedDP; `feddp bench` lists and runs them."""
