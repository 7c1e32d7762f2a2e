"""More bugs to plant: in what keeps images and videos from reaching what they must not, and from staying for ever."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/media.py": (
        Bug("the memory of a request is given back before its asker leaves", "await trio.sleep_forever()", "return"),
        Bug(
            "URLs are checked one by one, as they are fetched",
            "items.append(_Item(each, self.ports.source(each.url)))",
            "items.append(_Item(each, Source(CONTENT_BYTES_MIN, is_remote=True)))",
        ),
        Bug("the contents of a request have no limit together", "if sum(map(_held_bytes, items)) > bytes_max:", "if False:"),
        Bug("tensors are not released", "lease.callback(self.ports.release, item.tensor)", "str(self.ports.release)"),
    ),
    "actors/kit/fair_budget.py": (
        Bug("a large call waits for ever", "if any(other.overtaken_by >= other.units for", "if any(False for"),
        Bug("a call that is cancelled keeps its place", "self._queue.remove(entry)\n                self._give()", "self._give()"),
        Bug("one owner may have everything", "if held and held + waiter.units > self.owner_max:", "if False:"),
    ),
    "actors/vision/planning.py": (
        Bug("an image of low detail shares a digest with the same of high", "{task.height} {task.width} {fit.grid} ", ""),
        Bug("embeddings may be fewer than their tokens", "if tokens != facts.tokens:", "if tokens < facts.tokens:"),
        Bug("other settings of a model share a digest", "\\n{settings}\\n", "\\n"),
    ),
    "supervisor/media/addresses.py": (
        Bug("an address within another is not seen", "for each in (address, *_embedded(address))", "for each in (address,)"),
        Bug("addresses of private networks are public", "candidate and not any(", "candidate or not any("),
    ),
    "supervisor/media/fetching.py": (
        Bug("a redirect leads to any host", "            urls.check_allowed(url, self.rules.hosts)\n            answer", "            answer"),
        Bug(
            "an address is dialed that was not allowed",
            "[address for address in addresses if may_be_asked(address, self.rules.networks)]",
            "list(addresses)",
        ),
        Bug("https may become http", 'if url.scheme == "https" and parsed.scheme != "https":', "if False:"),
        Bug("the certificate of the address is asked for", "server_hostname=url.host", "server_hostname=str(address)"),
        Bug("a fetch may last for ever", "with trio.fail_after(self.rules.fetch_s):", "with trio.CancelScope():"),
    ),
    "supervisor/media/http.py": (
        Bug("a body may have any size", "if writer.size_bytes > self._limits.bytes_max:", "if False:"),
        Bug("chunks may cost any number of bytes", "if self._received > self._limits.bytes_max + FRAMING_BYTES_MAX:", "if False:"),
        Bug("small pieces are read without end", "if self._events > EVENTS_MAX + self._received", "if 0 > self._received"),
        Bug("an encoded body is taken", 'if encoding is not None and encoding.lower() not in {"", "identity"}:', "if False:"),
    ),
    "supervisor/media/files.py": (
        Bug("a link leads out of the root", "if not by_descriptor.readlink().is_relative_to(folder) or not", "if not"),
        Bug("a device is read", " or not stat.S_ISREG(os.fstat(place).st_mode)", ""),
    ),
    "supervisor/media/decoding.py": (
        Bug("a decoder that the system kills is its client's fault", "if answer.signal == signal.SIGKILL:", "if False:"),
        Bug("what a decoder says of a size is believed", "answers.checked_facts(inspected.facts)", "inspected.facts"),
        Bug("a descriptor that nobody wants stays open", "                    answers.close()\n", "                    pass\n"),
        Bug("a file of another size is mapped", "if not 0 <= size_bytes == sealed_size(self.received[0]):", "if sealed_size(self.received[0]) is None:"),
    ),
    "supervisor/media/contents.py": (
        Bug("a file that may shrink is mapped", "if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:", "if False:"),
    ),
    "supervisor/media/memory.py": (
        Bug(
            "a lease that ends while a file is being closed is forgotten",
            "self._closing.popleft()  #",
            "self._closing.popleft()\n                        if not self._closing:\n                            break  #",
        ),
        Bug("the pages of a lease stay mapped", "madvise(mmap.MADV_DONTNEED,", "madvise(mmap.MADV_NORMAL,"),
    ),
    "actors/media_decoder/__main__.py": (
        Bug("a job whose asker has left goes on", "signal.pidfd_send_signal(running.pidfd, signal.SIGKILL)", "str(running)"),
    ),
    "actors/media_decoder/images.py": (
        Bug("pixels are decoded before they are counted", "    check_size(height, width, bounds)\n    if kind", "    if kind"),
        Bug("an animation is its first frame", 'bool(getattr(image, "is_animated", False))', "False"),
        Bug("a photograph stays as it lies", "for step in _UPRIGHT.get(_orientation(image), ()):", "for step in ():"),
    ),
    "actors/media_decoder/sandbox.py": (
        Bug("a decoder may open files", "*(0, 1, 3, 8,", "*(0, 257, 3, 8,"),
        Bug("a decoder may have any signal sent", "(_JUMP_IF_EQUAL, 0, 1, fcntl.F_ADD_SEALS)", "(_JUMP_IF_EQUAL, 0, 0, fcntl.F_ADD_SEALS)"),
        Bug("a decoder may compute for ever", "(resource.RLIMIT_CPU, limits.cpu_s),", ""),
    ),
    "actors/media_decoder/job.py": (
        Bug(
            "a content is parsed before its digest is sent",
            "    opened = Opened(content.digest(data), len(data))\n",
            "    _facts(task, data)\n    opened = Opened(content.digest(data), len(data))\n",
            harmless="only a content that has taken over its process could tell, and no test has one",
        ),
    ),
}  # fmt: skip
