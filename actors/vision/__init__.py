"""Images and videos as models see them: sizes, patches, and the tokens that stand for them."""
