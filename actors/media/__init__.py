"""Images and videos: the actor that prepares them, sizes, patches and tokens, and the processes that decode them."""
