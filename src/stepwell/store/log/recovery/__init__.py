"""How a log opens, and its maintenance: recovery after a crash, checks, repairs, figures.

recover    a directory -> what the log knew          check      every byte verified
repair     damage dropped for good                   stat       values and bytes by namespace and tenant
"""
