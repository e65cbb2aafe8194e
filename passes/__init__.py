"""The passes of splitc, in reading order.

measure_costs, place                                   decide
scale_loss, seed_dropout, insert_comm, split_ranks,
bucket_gradients, schedule                             rewrite
"""
