import hashlib


def fingerprint(text):
    return hashlib.sha256(text).hexdigest()[:8]
# --- assertions
assert fingerprint("ramet") == fingerprint("ramet")
assert fingerprint("") == "e3b0c442"
