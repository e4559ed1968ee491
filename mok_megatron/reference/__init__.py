"""The operator in plain torch and torch.distributed, on any device: the oracle of the tests.

Written to be read, in this order: `backend.py` (the steps), `experts.py` (the arithmetic), `exchange.py` (who
sends what to whom).
"""
