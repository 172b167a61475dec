"""The demonstration behind ``nvfp4 demo``: a real model's weights, a page of real text.

``model.py`` reads the weights and makes activations of the text, ``job.py`` is the work and what
is measured, ``picture.py`` draws it. The page, ``page.txt``, is the opening of Lewis Carroll's
*Alice's Adventures in Wonderland* (1865, in the public domain).
"""
