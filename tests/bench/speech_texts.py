"""Plain English sentences from word lists and patterns written for this project: thousands of them,
each once, the same ones every time.

Words are common ones that a recogniser with a general language model knows; sentences are simple,
in lower case and without punctuation or digits, some two to four seconds long when spoken. `split`
keeps some sentences out of training, of words that occur there.
"""

from __future__ import annotations

import random
from collections import Counter


def _list(text: str) -> list[str]:
    """Phrases between bars and line ends."""
    return text.replace("\n", "|").split("|")


PEOPLE = """the old man|the young woman|my brother|my sister|her father|his mother
our teacher|the doctor|the farmer|the captain|the driver|the king|the queen|the little boy
the little girl|a good friend|the new student|my uncle|their son|our neighbor|the lawyer
the president|the soldier|the police officer|her husband|his wife|the judge|the writer|the painter
the singer|the manager|the owner|the nurse|the baker|the waiter|a young man|an old woman
the tall man|the reporter|the pilot""".replace("\n", "|").split("|")
GROUPS = _list(
    """the children|my parents|our friends|the workers|the students|the people
some women|many families|the players|two men|three girls|the farmers|the soldiers|the boys
their neighbors|a few tourists|the members|the teachers"""
)
HANDLED = """opened the door|closed the window|found the key|lost the letter
carried the box|cleaned the kitchen|painted the wall|washed the car|sold the house|bought a horse
bought some bread|cooked the dinner|wrote a letter|wrote a long book|read the newspaper
read the report|broke the glass|dropped the plate|fixed the roof|fixed the engine|built a bridge
built a small boat|cut the paper|planted a tree|fed the dog|fed the chickens|caught a fish
made some coffee|made a mistake|took a picture|took the money|drank the water|drank a cup of tea
ate an apple|ate the cake|paid the bill|signed the contract|sent a message|answered the question
told a story|heard the news|heard a strange noise|saw the mountain|saw the fire|won the game
lost the race|learned the song|played the piano|played the guitar|changed the plan
followed the road|crossed the river|crossed the street|watched the game|watched the birds
visited the museum|visited the hospital|left the room|left the office|cleaned the floor
ordered the soup|called the police|called the office|brought the flowers|brought the chairs
moved the table|filled the bottle|lit the candle|wore a blue shirt|wore a black coat
wore a green hat|hid the gold|counted the coins|shared the food|cut the grass|packed the bag
rang the bell|drove the truck|rode the horse|climbed the hill|climbed the stairs|missed the train
caught the bus|held the rope""".replace("\n", "|").split("|")
MOVED = _list(
    """walked slowly|walked home|ran quickly|drove|went back|went|came|stood|waited
sat quietly|slept|worked|lived|stayed|danced|talked quietly|laughed|played
rested|arrived"""
)
PLACES = _list(
    """in the garden|in the kitchen|near the river|near the church|at the station
at the market|in the city|in a small village|on the beach|by the lake|under the bridge
behind the house|in front of the bank|at the end of the street|in the forest|on the farm|at school
in the library|across the road|outside the theater|on the island|in the old town|beside the road
above the valley|in the north|in the south|at the hotel|in the park
on the mountain|at home"""
)
TIMES = """in the morning|in the evening|last night|last week|last summer|every day
on monday|on tuesday|on wednesday|on thursday|on friday|on saturday|on sunday|after dinner
before lunch|after the storm|during the winter|in the spring|at noon|at midnight|early in the day
late in the afternoon|two years ago|ten minutes ago|an hour later|for a long time|once again
yesterday""".replace("\n", "|").split("|")
THINGS = """the house|the garden|the car|the train|the river|the water|the bread
the coffee|the letter|the story|the music|the weather|the city|the market|the school|the office
the church|the bridge|the road|the window|the table|the picture|the book|the game|the coat
the horse|the dog|the cat|the moon|the sky|the fire|the ground|the kitchen|the room|the wall
the answer|the plan|the work|the food|the soup|the milk|the beach|the island|the mountain
the forest|the field|the ship|the boat|the hotel|the price""".replace("\n", "|").split("|")
QUALITIES = _list(
    """very old|very small|very large|quite new|cold|warm|dark|bright|clean|dry|wet
white|black|red|green|blue|yellow|quiet|beautiful|famous|empty|full|heavy|cheap|expensive
difficult|easy|important|dangerous|safe|simple|strange|different|very good|bad|long|short|deep
high|slow|fast|strong|open|closed|wonderful|terrible|perfect|ready|gone|broken"""
)
SAID = _list(
    "said that|told us that|thought that|knew that|believed that|heard that|was sure that|wrote"
    " that|hoped that"
)
WISHES = _list(
    """wants to|would like to|has to|had to|is going to|was able to|decided to
promised to|tried to|forgot to|began to|needs to"""
)
DEEDS = _list(
    """open the door|close the window|find the key|write a letter|read the book
clean the kitchen|wash the car|sell the house|buy a new coat|buy some milk|cook the dinner
fix the roof|build a boat|plant a tree|feed the dog|catch the train|make some tea|take a picture
pay the bill|sign the paper|send a message|answer the question|tell the truth|win the game
learn the language|play the piano|change the plan|cross the river|watch the news|visit the museum
leave the city|call the doctor|bring the flowers|move the table|drive to the coast|ride the horse
climb the mountain|speak to the judge|meet the president|help the farmer|see the ocean
hear the music|eat an orange|drink some water|stay at home|sleep until noon|travel to the north
work in the garden|swim in the lake|walk to the station|wait for the bus|go back to school
come to the party|sit by the fire"""
)
COUNTED = _list(
    """there were|we saw|they had|we found|she counted|he bought|they sold|i remember"""
)
NUMBERS = _list(
    "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|fifty|a"
    " hundred|many|several|only a few"
)
MANY = _list(
    """horses|houses|children|apples|books|boats|flowers|chairs|bottles|trees|birds
dogs|cats|letters|boxes|people|soldiers|students|windows|pictures|candles|coins|tables|trucks|cups
stones|sheep|cows|tickets|hats"""
)
WHY = _list(
    """because it was late|because it was raining|because of the snow
but nobody answered|but it was too late|and then went home|and smiled|and said nothing
with great care|with his hands|without a word|for the first time|as usual|and felt better
because the weather was bad|but the door was closed|and waited"""
)
ASKED = """where did|when did|why did|how did""".split("|")


def sentences(count: int, seed: int = 1) -> list[str]:
    """`count` different sentences. ValueError: the lists do not give as many."""
    random_, made, out = random.Random(seed), set(), []
    for _ in range(count * 50):
        text = _sentence(random_)
        if text not in made and 4 <= len(text.split()) <= 11:
            made.add(text)
            out.append(text)
            if len(out) == count:
                return out
    raise ValueError(f"only {len(out)} different sentences, not {count}")


def split(texts: list[str], held_out: int, least: int = 8) -> tuple[list[str], list[str]]:
    """Training sentences and the first `held_out` ones all of whose words occur `least` times or
    more in the others.
    """
    left = Counter(word for text in texts for word in text.split())
    held = []
    for text in texts:
        words = Counter(text.split())
        if len(held) < held_out and all(left[w] - n >= least for w, n in words.items()):
            held.append(text)
            left -= words
    if len(held) < held_out:
        raise ValueError(
            f"only {len(held)} sentences consist of words that occur {least} times elsewhere"
        )
    kept = set(held)
    return [text for text in texts if text not in kept], held


def _sentence(random_: random.Random) -> str:
    pick = random_.choice
    who = pick(PEOPLE + GROUPS)
    patterns = (
        lambda: f"{who} {pick(HANDLED)} {pick(TIMES)}",
        lambda: f"{who} {pick(HANDLED)} {pick(PLACES)}",
        lambda: f"{pick(TIMES)} {who} {pick(HANDLED)}",
        lambda: f"{who} {pick(HANDLED)} {pick(WHY)}",
        lambda: f"{who} {pick(MOVED)} {pick(PLACES)} {pick(TIMES)}",
        lambda: f"{who} {pick(MOVED)} {pick(PLACES)} {pick(WHY)}",
        lambda: f"{pick(PEOPLE)} {pick(SAID)} {pick(THINGS)} was {pick(QUALITIES)}",
        lambda: f"{pick(THINGS)} {pick(PLACES)} was {pick(QUALITIES)}",
        lambda: f"{pick(THINGS)} was {pick(QUALITIES)} and {pick(QUALITIES)}",
        lambda: f"{pick(PEOPLE)} {pick(WISHES)} {pick(DEEDS)}",
        lambda: f"{pick(PEOPLE)} {pick(WISHES)} {pick(DEEDS)} {pick(TIMES)}",
        lambda: f"{pick(COUNTED)} {pick(NUMBERS)} {pick(MANY)} {pick(PLACES)}",
        lambda: f"{pick(ASKED)} {pick(PEOPLE)} {pick(DEEDS)}",
    )
    return pick(patterns)()
