"""The passes of splitc: count_costs, place or use_plan, and predict decide; `rewriting` lists those that rewrite."""
