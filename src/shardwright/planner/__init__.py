"""Which layouts fit, what each costs, which to try first: pure Python, no torch."""
