"""Tables of text: what ranks present of their data, what they have found on their hosts, what was timed."""
