"""The APIs of clients, as pure data: bytes to requests to a processor, and its replies to bytes.

One file, or folder, for each API: `chat`, `completions`, `responses`, `tokens`. They share the fields of requests
(`options`, `formats`, `prompt`), reading and its errors (`request_body`, `http`), and the writing of answers
(`choices`, `answer_builder`, `logprobs`). A request is read strictly: each field is honoured, is accepted because its
value changes nothing, or is refused by name. Answers are encoded as their pieces come, in the fewest steps, because
that runs for every token. No file here depends on connections, keys, engines or time.
"""
