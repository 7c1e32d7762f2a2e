"""The cost of pictures to others and to the machine: for text streams beside them, in memory, and with a cache.

Three parts, on a front that fetches and decodes, an encoder, a prefill and a decode, each a process of its own:

- *streams*: 64 text streams alone, and while 32 clients send pictures of 2 MB one after the other, in turns. Compared
  are the 99th percentiles of the gap between two tokens; beside pictures it may be 1.5 times as long.
- *memory*: 2,000 different pictures. The memory, descriptors, threads and files in memory of each process, and its
  names under /dev/shm, do not grow after the first quarter, in which allocators and caches fill.
- *cache*: 50 pictures, 20 times each, with the encoder's cache and without: which of them were encoded, and the time
  and the CPU time of a picture.
"""
