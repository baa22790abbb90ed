"""What happens between a tool call's JSON text and its answer.

`arguments` reads and checks the text, `execute` runs the function within its time limit (`workers`
keeps the threads, `isolation` the processes), `content` turns the result into what the model reads.
"""
