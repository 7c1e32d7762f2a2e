"""Images and videos in SGLang's processes: towers, pixels, and the inputs of the scheduler."""
