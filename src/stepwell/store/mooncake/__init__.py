"""The Mooncake store: values in the pooled memory of many machines, behind the interface of `stepwell.store.api`.

opening    a name and options -> an open store     config     the settings of a client, from JSON or texts
store      the six verbs                           session    one membership in a cluster, and the verbs that use it
lanes      registered memory, batches through it   client     the calls of Mooncake that we use; imports its wheel
"""
