"""The verb `check`: does a layout train the same objective as one process does?"""
