"""Views of runs: terminal, browser page, notebook, figures, tables.

``terminal``, ``dashboard``, ``notebook`` and ``page`` show something while it trains. Functions called ``*_page`` and
``*_table`` return what the commands print at the end, ``*_plots`` the braille plots in the terminal, and ``*_figure``
the PNG files, drawn by matplotlib, which is imported only then. A page is one function that is read from top to bottom,
with a comment above each of its parts.
"""
