"""The method alone: a vision transformer whose blocks run in any order. To be read in this order:

1. `draws`, `orders`, `policies`: what an order is, and how one is drawn from (seed, step).
2. `discovery`: which blocks of a model can take each other's place.
3. `stack`, `entries`, `runs`, `hooks`, `tensors`: the backbone's own forward runs them in order.
4. `sharing`: blocks that share more than the state run order by order.
5. `forwards`, `evaluation`: many orders over the same images, and their scores.
6. `position`, `position_forms`, `tying`: what the paper and this project add to a model.
7. `methods`, `losses`: presets of training, and the loss that trains them in any loop.
8. `compiling`: one graph per block for all orders.
"""
