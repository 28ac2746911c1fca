"""Which order ``ctx.loader`` uses, from its arguments."""

from __future__ import annotations

from clusterddp.data.orders.order import Order
from clusterddp.data.orders.plain import Sequential, Shuffled


def chosen(*, shuffle: bool | None, order: Order | None) -> Order:
    """The order that the arguments of ``ctx.loader`` ask for. Raises TypeError where they ask for two."""
    if order is None:
        return Sequential() if shuffle is False else Shuffled()
    if shuffle is not None:
        raise TypeError(f"shuffle={shuffle} and order=: the order says whether samples are shuffled; give one of them")
    if not isinstance(order, Order):
        raise TypeError(f"order is {order!r}: expected one of clusterddp.orders, such as orders.weighted(weights)")
    return order
