module testbed/peer

go 1.26.0
