"""Failed handshakes are distinguished from connections on which calls follow."""

from ballast.rpc.tls import Handshakes


def test_connections_without_a_call_count_after_a_while_and_others_never() -> None:
    now_s = 100.0
    handshakes = Handshakes(lambda: now_s)
    for _ in range(5):
        handshakes.begins()
    for connection in ("ipv4:1.2.3.4:5", "ipv4:1.2.3.4:6", "ipv4:1.2.3.4:5"):
        handshakes.has_call(connection)
    assert handshakes.failed_count == 0
    now_s += 60.0
    assert handshakes.failed_count == 3
    handshakes.has_call("ipv4:1.2.3.4:7")  # a late call, or one without TLS
    handshakes.begins()
    assert handshakes.failed_count == 3


def test_new_connections_do_not_delay_the_count_of_a_failed_handshake() -> None:
    now_s = 100.0
    handshakes = Handshakes(lambda: now_s)
    handshakes.begins()  # no call follows
    for connection in range(6):
        now_s += 4.0
        handshakes.begins()
        handshakes.has_call(f"ipv4:1.2.3.4:{connection}")
    assert handshakes.failed_count == 1
