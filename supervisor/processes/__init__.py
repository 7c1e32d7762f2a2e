"""Child processes: started, watched, ended and reaped; their folder, and a bounded log of their output."""
