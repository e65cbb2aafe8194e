"""The passes of splitc: measure_costs, place or use_plan, and predict decide; `rewriting` lists those that rewrite."""
