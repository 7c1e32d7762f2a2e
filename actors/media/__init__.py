"""Images and videos: the preparing actor, sizes, patches and tokens, and the decoder processes."""
