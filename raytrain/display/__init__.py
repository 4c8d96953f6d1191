"""Views of runs: terminal, browser page, notebook, figures, tables.

``*_terminal``, ``live_view`` and ``dashboard`` draw while something trains; ``notebook`` does so below a cell.
``*_table`` and ``*_tables`` are what the commands print at the end, ``*_plot`` and ``*_plots`` the braille plots in the
terminal, ``*_figure`` and ``*_figures`` the PNG files, drawn by matplotlib, which is imported only then.
"""
