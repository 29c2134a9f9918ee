"""Conversion of instances' announcements, sent to and by the monitor, from and to protobuf."""

from ballast.common.instance import Instance
from ballast.rpc import border, codec
from ballast.rpc.mapping import Mapper
from ballastpb.monitor.v1.monitor_pb2 import Announce

MODEL = codec.MODEL  # importing it registers the mapper of ModelInfo, which INSTANCE uses for the nested message


def check_announce(message: Announce) -> None:
    border.name("announce.worker_id", message.worker_id)
    border.within("announce.incarnation", message.incarnation, 1, border.MAX_EPOCH)
    border.address("announce.address", message.address)
    if message.data_address:
        border.address("announce.data_address", message.data_address)
    border.within("announce.protocol", message.protocol, 0, border.MAX_EPOCH)
    border.within("announce.model.layer_count", message.model.layer_count, 1, border.MAX_LAYERS)


INSTANCE = Mapper(Instance, Announce, check=check_announce)
