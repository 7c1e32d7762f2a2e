"""Images and videos: the actor that prepares them, their sizes, patches and tokens, and the processes that decode them."""
