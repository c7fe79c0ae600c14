"""Lightning's Trainer by duck type: where it stands, what it does, what each batch has made."""
