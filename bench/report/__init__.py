"""`python -m bench report`: one self-contained HTML page from the documents of any bench."""
