"""The verbs that plan, check, measure, break and show runs."""
