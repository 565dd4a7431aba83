"""Small plans for tests of what consumes them."""

import numpy as np

from common.data.buckets import Bucket
from common.data.plan import Plan, PlanRows, write_plan


def small_plan(folder, n, *, batch_size=4, buckets=2, name="train", seed=3):
    """`n` utterances dealt out over `buckets` shapes; "eval" is fixed, "train" reshuffles each
    epoch.
    """
    table = [Bucket(batch_size, 20 * (b + 1), 10, 10) for b in range(buckets)]
    ids = np.arange(n)
    sampling = "fixed" if name == "eval" else "epoch"
    write_plan(
        folder,
        name,
        PlanRows(ids=ids, bucket_of=(ids % buckets).astype(np.int16), language=ids * 0),
        seed=seed,
        sampling=sampling,
        buckets=table,
    )
    return Plan.open(folder, name)
