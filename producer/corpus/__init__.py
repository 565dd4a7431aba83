"""From a corpus on disk to a manifest: rows of metadata, headers of audio, the scan and
its report.
"""
