"""The software device's ATC: its command line, its rules, shapes and gears, the `.om` it writes."""
