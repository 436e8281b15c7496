from octavo.loadtest.wire import SSEDecoder, error_message


def test_events_are_found_whatever_the_cuts() -> None:
    stream = (
        ': keep-alive\n\ndata: {"a":"x\u2028é"}\r\n\r\ndata:{"b":1}\n\ndata: [DONE]\n\n'.encode()
    )
    for cut in range(len(stream)):
        decoder = SSEDecoder()
        events = decoder.feed(stream[:cut]) + decoder.feed(stream[cut:])
        assert events == ['{"a":"x\u2028é"}'.encode(), b'{"b":1}', b"[DONE]"]


def test_an_event_is_given_when_its_line_ends() -> None:
    decoder = SSEDecoder()
    assert decoder.feed(b"data: 1") == []
    assert decoder.feed(b"2\n") == [b"12"]


def test_message_of_error_bodies() -> None:
    assert error_message(b'{"error": {"message": "queue full", "code": null}}') == "queue full"
    assert error_message(b'{"error": "old form"}') == "old form"
    assert error_message(b'{"object": "error", "message": "flat form"}') == "flat form"
    assert error_message(b"<html>Bad gateway</html>") == "<html>Bad gateway</html>"
    assert error_message(b"[1]") == "[1]"
    assert error_message(b"") == ""
