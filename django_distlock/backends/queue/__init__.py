"""The recipe that ZooKeeper and etcd share: a queue of nodes on the server; each node ends with its session."""
