"""The method alone: a vision transformer whose blocks run in any order. To be read in this order:

1. `draws`, `orders`, `policies`: what an order is, and how one is drawn from (seed, step).
2. `discovery`, `stack`, `entries`, `runs`, `hooks`: the backbone's own forward runs its blocks in
   that order.
3. `methods`, `losses`, `evaluation`: presets of training, the loss that trains them in any loop,
   and scores under many orders (`forwards` runs them).
4. `position`, `tying`, `branches`, `compiling`: what the paper and this project add to a model, how
   much its blocks add to the state at first, and one graph per block for all orders.

`checks/` holds everything that refuses, warns or tries; nothing of it changes what a model
computes. `tensors`, `position_forms` and `torch_private` serve the files above.
"""
