"""The demo's prompts: ordinary work, none of it written to repeat itself."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PROMPTS", "Prompt"]


class Prompt(NamedTuple):
    """`new_tokens` is how many tokens the demo asks for when time allows."""

    name: str
    text: str
    new_tokens: int


EDIT = '''\
Rename the method find to titles_by. Print the whole class, with nothing else changed.

```python
class Shelf:
    """Books in a small library, by title."""

    def __init__(self, room, capacity=40):
        self.room = room
        self.capacity = capacity
        self.books = {}

    def add(self, title, author, year):
        if len(self.books) >= self.capacity:
            raise ValueError("the shelf is full")
        self.books[title] = (author, year)

    def find(self, author):
        return [t for t, (a, _) in self.books.items() if a == author]

    def oldest(self):
        return min(self.books, key=lambda title: self.books[title][1])
```'''

QUOTE = """\
Notice to residents. The water supply to Harbour Street and Mill Lane will be shut off on \
Thursday, 14 May, from 8.30 in the morning until about 3 in the afternoon, while the main valve \
below the old bakery is replaced. Please fill a few jugs the evening before. A tank lorry with \
drinking water will stand in front of the school. Anyone who cannot carry water should call the \
town office at 555-0148 before Wednesday noon. Once the supply is back, let the cold tap run for \
two minutes.

Quote the sentences of this notice that say when the water is off, where drinking water can be \
had, and what to do afterwards."""

LETTER = """\
Write a letter to my neighbour, Mrs. Olsen. Thank her for looking after our cat and our tomatoes \
while we were in the mountains, tell her about the storm we met there, and invite her to dinner."""

PROMPTS = (
    Prompt("edit", EDIT, 160),
    Prompt("quote", QUOTE, 80),
    Prompt("letter", LETTER, 80),
)
