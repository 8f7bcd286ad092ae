collect_ignore = ["titan.py"]  # a script: it takes a CPU for the accelerator of its process
