import sys

from docmoe.corpus import write_shards

if __name__ == "__main__":
    write_shards(sys.argv[1] if len(sys.argv) > 1 else "data/docs")
