"""The Mooncake store: values in the pooled memory of many machines, behind the seam of `stepwell.store.api`.

opening    a name and options -> an open store     config     what a client is told, from JSON or texts
store      the six verbs                           session    one membership in a cluster: who may still use it
lanes      registered memory, batches through it   client     Mooncake's calls in our words; imports its wheel
"""
