"""The page of a run in the browser: curves, progress, events, images, and a button that stops it."""
