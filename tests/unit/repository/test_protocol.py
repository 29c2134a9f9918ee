"""The protocol number is raised whenever messages between workers change."""

import ast
import hashlib
import inspect
import re
import textwrap

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto

from ballast.common.protocol import PROTOCOL
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.worker.v1 import stage_pb2

pytest.importorskip("torch")

from services.worker.links import frame
from services.worker.links.frame_kinds import FrameKind
from services.worker.links.traffic import TrafficClass
from services.worker.memory.kv_cache import KvCache
from services.worker.pipeline.hub import Hub
from services.worker.pipeline.wire import Topic

HASHES = {
    1: "2ae59ccde4e8431a",
    2: "2962c1c9eb09008e",
    3: "fe86d3c528ba4c58",
    4: "8542307c23b2efbe",
    5: "492a6792f88c55e6",
    6: "f96145a6c6676a83",
    7: "f9dee233e4bfb178",
    8: "9a70b9f5154d4fec",
    9: "0331143d157f2d86",
    10: "fae438c20f1b302a",
    11: "13852e17c9126f4f",
    12: "3ff166cdc0405b7c",
}  # protocol number -> hash of its messages; hashes of old numbers stay


def bodies_read() -> list[tuple[str, list[str]]]:
    """Per topic of `Hub.on_message`: the message types, fields and decoders that the receiver uses."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(Hub.on_message))).body
    return [
        (ast.unparse(case.pattern), sorted({name for statement in case.body for name in names_of_bodies(statement)}))
        for node in ast.walk(tree)
        if isinstance(node, ast.Match)
        for case in node.cases
    ]


def names_of_bodies(statement: ast.stmt) -> list[str]:
    names = [ast.unparse(node) for node in ast.walk(statement) if isinstance(node, ast.Name | ast.Attribute)]
    return [name for name in names if re.fullmatch(r"(pb|message)\.\w+|\w+_from_bytes|_whole", name)]


def what_is_said() -> list[object]:
    """Everything that defines the protocol: messages between stages with their topics and the cluster's messages in
    them, frames on links, and the order of KV in memory.
    """
    messages: list[DescriptorProto | EnumDescriptorProto] = []
    for name in ("SamplingParams", "TokenIds", "Grammar", "TokenLogprob", "Logprobs"):
        message = DescriptorProto()
        cluster_pb2.DESCRIPTOR.message_types_by_name[name].CopyToProto(message)
        messages.append(message)
    for name in ("FinishReason", "PriorityClass"):
        enum = EnumDescriptorProto()
        cluster_pb2.DESCRIPTOR.enum_types_by_name[name].CopyToProto(enum)
        messages.append(enum)
    header = (frame._LAYOUT.format, frame.MAGIC, frame.VERSION, [str(dtype) for dtype in frame._DTYPES])
    kinds = [[(one.name, one.value) for one in kind] for kind in (FrameKind, TrafficClass, Topic)]
    kv = [line.strip() for line in inspect.getsource(KvCache).splitlines() if "full_shape =" in line]
    assert len(kv) == 1
    return [
        stage_pb2.DESCRIPTOR.serialized_pb,
        [m.SerializeToString() for m in messages],
        header,
        kinds,
        kv,
        bodies_read(),
    ]


def test_a_change_of_messages_between_workers_raises_the_protocol_number() -> None:
    found = hashlib.sha256(repr(what_is_said()).encode()).hexdigest()[:16]
    assert HASHES[PROTOCOL] == found, (
        "the messages between workers have changed: raise PROTOCOL (ballast/common/protocol.py), unless no"
        f" commit of main has the present number, and put {found!r} here"
    )
    assert max(HASHES) == PROTOCOL
