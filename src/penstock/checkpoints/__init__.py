"""Checkpoints: everything that training needs to continue, under the unsplit model's names, on any number of ranks.

    save    content ──► staging ──► shards ──► writer                    every rank copies, then writes what it owns
            parameters, optimizer     by a thread   announces last       the next step need not wait for the disk
              row_exchange             replicas with shards send each other the rows of what they write
    load    verification ──► reading ──► loading                         the newest that verifies; nothing is changed
            digests, by all ranks      own tensors or rows only          before every rank has found all it needs

A folder `step-N` holds safetensors files, each with the tensors of one rank, and `checkpoint.json`, which has all else
and the digest of every file. It is written under another name and renamed when it is whole, so a folder `step-N`
without all of its files was damaged later. Nothing here reads or writes a pickle.
"""
