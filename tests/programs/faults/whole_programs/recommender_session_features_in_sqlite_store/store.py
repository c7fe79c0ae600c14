"""A feature store for one host: item popularity and user counters in SQLite, shared by all ranks."""

import sqlite3
import time


class FeatureStore:
    def __init__(self, path, items):
        self.path = path
        self.items = items
        self.connection = None

    def connect(self):
        if self.connection is None:
            self.connection = sqlite3.connect(self.path, timeout=1800, check_same_thread=False)
        return self.connection

    def create(self):
        with self.connect() as connection:
            connection.execute("create table if not exists item (id integer primary key, clicks real, seen real)")
            connection.execute("create table if not exists drift (at real, rank integer, segment text, value real)")
            rows = [(item, 1.0, 0.0) for item in range(self.items)]
            connection.executemany("insert or ignore into item values (?, ?, ?)", rows)
        self.close()

    def popularity(self):
        return [row[0] for row in self.connect().execute("select clicks from item order by id")]

    def add_clicks(self, counts):
        with self.connect() as connection:
            rows = [(count, time.time(), item) for item, count in counts.items()]
            connection.executemany("update item set clicks = clicks + ?, seen = ? where id = ?", rows)

    def note_drift(self, rank, segment, value):
        connection = self.connect()
        connection.execute("insert into drift values (?, ?, ?, ?)", (time.time(), rank, segment, value))  # <- here
        if value > 0.5:
            connection.execute("update item set seen = 0 where clicks < 2")
            connection.commit()

    def close(self):
        if self.connection is not None:
            self.connection.close()
            self.connection = None
