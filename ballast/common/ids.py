"""Identifiers: strings created at an edge (SDK, servicer, `__main__`), never in a core."""

from typing import NewType

RequestId = NewType("RequestId", str)  # one request of one client, for its whole life
WorkerId = NewType("WorkerId", str)  # one instance; stable over restarts of its process
DispatcherId = NewType("DispatcherId", str)
GroupId = NewType("GroupId", str)  # an ordered list of instances that serve together

# Number of one process lifetime of a worker or dispatcher. It grows with every start, so that messages of an earlier
# lifetime are recognised and refused (I5).
Incarnation = NewType("Incarnation", int)

# Version number of the cluster layout; grows by one with every plan.
Epoch = NewType("Epoch", int)
