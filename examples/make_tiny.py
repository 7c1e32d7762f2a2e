"""Train the tiny chat model of examples/tiny from sentences made up here.

Usage: python examples/make_tiny.py OUT_DIR [--steps N]

The model is a Qwen2 of less than half a million parameters with a byte-level BPE tokenizer of 512 tokens and a ChatML
template. It knows next to nothing, but it answers readable text, stops by itself and runs on any machine, so that a
server can be tried without a download. Nothing is fetched: the text is generated from the tables below, the
same text for the same seed. It needs torch 2.9 or later (for Muon), transformers and tokenizers.
"""

import argparse
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

# Without it transformers asks the hub about every folder it opens.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import torchvision  # noqa: F401  # transformers imports it
except RuntimeError:
    # The package index has it for GPUs alone: where there is none, it misses two of its operators.
    sys.path.append(str(Path(__file__).parents[1] / "actors" / "engines" / "sglang" / "host" / "cpu"))
    import espalier_sglang_cpu

    espalier_sglang_cpu.prepare()

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

SEED = 20
STEPS = 1500
VOCAB_SIZE = 512
CONTEXT = 4096
END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

Turn = tuple[str, str]

# name: (what it is, two things to know about it, colour, emoji)
TREES = {
    "oak": ("a broad old tree", "Its acorns feed the jay and the squirrel.", "It can live for five hundred years.",
            "green", "🌳"),
    "birch": ("a slender northern tree", "Its bark is white and peels like paper.",
              "It is at home from Åland to 北海道.", "white", "🌿"),
    "apple": ("a small garden tree", "It blossoms in May and bears fruit in autumn.",
              "An espalier keeps it flat against a wall.", "red", "🍎"),
    "pear": ("a patient fruit tree", "It loves a warm wall and a careful gardener.",
             "In French the fruit is called « poire ».", "yellow", "🍐"),
    "willow": ("a soft tree of the river", "Its branches hang down to the water.", "Baskets are woven from its twigs.",
               "silver", "🌿"),
    "pine": ("an evergreen tree", "It has needles and cones, and it smells of resin.",
             "It keeps its green coat in the snow.", "dark", "🌲"),
    "maple": ("a tree of bright autumns", "Its leaves turn red and gold.", "In Japanese it is called 楓.", "red", "🍁"),
    "cherry": ("a tree of short springs", "People in 東京 sit under it when it blossoms.",
               "Its flowers fall like snow.", "pink", "🌸"),
    "olive": ("a silver tree of the south", "It gives oil for a thousand years.", "In Αθήνα it stands for peace.",
              "silver", "🌿"),
    "lemon": ("a small tree with thorns", "It bears flowers and fruit at the same time.", "It fears the frost.",
              "yellow", "🍋"),
}
ANIMALS = {
    "fox": ("a clever red animal", "It hunts mice and listens to the snow.", "Its den has more than one door.",
            "red", "🦊"),
    "owl": ("a quiet bird of the night", "It turns its head almost all the way round.", "Nobody hears it fly.",
            "grey", "🦉"),
    "bear": ("a heavy friend of honey", "It sleeps through the winter.", "It eats berries, fish and much else.",
             "brown", "🐻"),
    "hare": ("a fast animal with long ears", "It sleeps with open eyes.", "In the north its coat is white in winter.",
             "brown", "🐇"),
    "cat": ("a small hunter on soft feet", "It sleeps most of the day.", "It purrs when it is content.", "black", "🐈"),
    "dog": ("an old friend of ours", "It knows the world by its nose.", "It is always glad when you come home.",
            "brown", "🐕"),
    "bee": ("a small worker of the garden", "It dances to show the way to flowers.", "It makes honey from them.",
            "golden", "🐝"),
    "frog": ("a green singer of the pond", "It drinks through its skin.", "It begins its life as a tadpole.",
             "green", "🐸"),
    "whale": ("the largest animal of the sea", "It sings to its friends far away.", "It must come up to breathe.",
              "blue", "🐋"),
    "wolf": ("a grey wanderer", "It lives with its family, the pack.", "It howls so that the others know where it is.",
             "grey", "🐺"),
    "snail": ("a slow animal with a house", "It carries its house on its back.", "It loves rain and salad.",
              "brown", "🐌"),
    "horse": ("a strong runner", "It can sleep on its feet.", "It has the largest eyes of all land animals.", "brown",
              "🐎"),
}
THINGS = {
    "moon": ("our small neighbour in the sky", "It goes round the Earth in a month.", "It has no light of its own.",
             "silver", "🌙"),
    "sun": ("the star that we live by", "Its light needs eight minutes to reach us.", "Plants live on it.", "golden",
            "☀"),
    "sea": ("a great salt water", "It rises and falls with the moon.", "It covers most of the Earth.", "blue", "🌊"),
    "river": ("a road of water", "It begins at a spring and ends at the sea.", "It is never the same twice.", "green",
              "🏞"),
    "rain": ("water that falls from the clouds", "The garden waits for it in summer.",
             "It smells best after a dry week.", "grey", "🌧"),
    "garden": ("a place where people and plants meet", "It needs water, light and time.",
               "In the middle of it stands an apple tree.", "green", "🌱"),
}
SUBJECTS = TREES | ANIMALS | THINGS

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome", "Poland": "Warsaw", "Japan": "Tokyo",
    "China": "Beijing", "Korea": "Seoul", "Brazil": "Brasília", "Colombia": "Bogotá", "Peru": "Lima",
    "Paraguay": "Asunción", "Iceland": "Reykjavík", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Greece": "Athens", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi", "India": "New Delhi",
    "Canada": "Ottawa", "Austria": "Vienna", "Moldova": "Chișinău",
}
LANGUAGES = ("Japanese", "Chinese", "Korean", "French", "German", "Spanish", "Russian", "Greek")
WORDS = {english: dict(zip(LANGUAGES, words, strict=True)) for english, words in {
    "tree": ("木", "树", "나무", "arbre", "Baum", "árbol", "дерево", "δέντρο"),
    "water": ("水", "水", "물", "eau", "Wasser", "agua", "вода", "νερό"),
    "moon": ("月", "月亮", "달", "lune", "Mond", "luna", "луна", "φεγγάρι"),
    "cat": ("猫", "猫", "고양이", "chat", "Katze", "gato", "кошка", "γάτα"),
    "thank you": ("ありがとう", "谢谢", "감사합니다", "merci", "danke", "gracias", "спасибо", "ευχαριστώ"),
    "hello": ("こんにちは", "你好", "안녕하세요", "bonjour", "hallo", "hola", "привет", "γεια σου"),
}.items()}
WORDS["hello"] |= {"Arabic": "مرحبا", "Hindi": "नमस्ते", "Portuguese": "olá", "Czech": "dobrý den", "Turkish": "merhaba"}
NUMBERS = ("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
           "eighteen nineteen twenty").split()
NAMES = "Ada Bo Chloé Dmitri Eva Félix Grace Hugo Ines Jörg Kim Lena Maya Noah Olga Paul Rosa Søren Tom Zoë".split()
SMALL_TALK = {
    ("Hello", "Hi", "Hey", "Hello there", "Hi there", "Good morning", "Say hello"): (
        "Hello! I am glad to see you. What shall we talk about? 👋", "Hello! Ask me about a tree or an animal. 🌱",
        "Hi there! Would you like a story? 🦊"),
    ("How are you", "How do you do", "What's up"): (
        "I am well, thank you. The garden is quiet today. 🌿", "Very well, thank you! And how are you? 😊"),
    ("Who are you", "What are you", "What is your name", "Introduce yourself"): (
        "I am a very small model, grown on a few thousand sentences. 🌱",
        "I am a tiny language model. I live in less than one megabyte. 🐌"),
    ("What can you do", "Help", "Can you help me"): (
        "I can tell stories, count, name capitals and talk about trees and animals. 🌳",
        "Ask me for a story about the fox, or for the capital of Japan. 🦊"),
    ("Thank you", "Thanks", "Thanks a lot"): ("You are welcome! 😊", "It was a pleasure. 🌸"),
    ("Goodbye", "Bye", "Good night", "See you"): ("Goodbye! Come back soon. 👋", "Sleep well! 🌙"),
    ("Tell me a joke", "Make me laugh"): (
        "Why did the tree go to the dentist? It needed a root canal! 😄",
        "What did the snail say on the back of the turtle? « Not so fast! » 🐌"),
}
PLACES = ("in a garden near Kraków", "on a hill above 京都", "by the sea at Åland", "at the edge of São Paulo",
          "under a bridge in Zürich", "in an old orchard", "beside a quiet pond", "behind the mill of Malmö")
MOODS = "little curious quiet lonely brave sleepy cheerful shy".split()
HABITS = ("counted the stars", "sang to the river", "waited for the post", "drew maps in the sand",
          "drank café au lait", "looked for the moon", "listened to the wind", "swept the path")
EVENTS = ("a letter came from far away ✉", "the river began to sing 🎵", "a great storm broke the fence ⚡",
          "the first snow fell ❄", "a red balloon came down 🎈", "all the lamps went out 🕯",
          "a golden key lay in the grass 🔑", "a strange ship stood on the water ⛵")
QUESTIONS = ("Can you help me?", "Will you come with me?", "Do you know the way?", "May I stay here tonight?",
             "Have you seen my hat?", "Is this the road to 東京?")
ANSWERS = ("Of course", "Why not", "With pleasure", "Bien sûr", "If we hurry", "Come in")
DEEDS = ("walked through the forest", "crossed the dark water", "climbed the highest hill", "built a small boat",
         "asked every bird for the way", "lit a lamp and began to search")
FINDS = ("they found a door that nobody had seen", "they met an old gardener with a blue hat",
         "they heard music under the ground", "they saw the whole valley in the light",
         "they found a box full of letters", "they came to a table with bread and honey 🍯")
LESSONS = ("nobody is too small to help", "a good friend is better than a map", "the night is not dark for two",
           "every road begins at the door", "patience bears fruit", "a song can be a lamp")
SYSTEM = ("You are a helpful assistant.", "You are a kind gardener.", "You are Espalier, a tiny model.",
          "Answer the user's questions.", "You are a poet who lives in a small house by the sea.", "Be friendly.")
BRIEF = ("Be brief.", "Answer in one sentence.", "You are a helpful assistant. Be brief.")
COMMON = ("what why how when where who which the a of in to for with and or but is are was does do can will explain "
          "describe write list give show system computer program music number time people world day year work life "
          "problem question answer idea word text name place thing part house city food money book paper letter "
          "science history language nature energy light color game team plan paragraph sentence structured "
          "concurrency network server memory model data code function test error request message token user new good "
          "long short big small first last great own other right same every one two some more lorem ipsum dolor sit "
          "amet alpha beta gamma delta quick jumps over lazy").split()
SYLLABLES = "ba be bo da di du fa fe fi ga go ka ki ku la le lo ma mi mu na ne no pa pi ra re ro sa si ta te to vi zo"


def with_article(name: str) -> str:
    """Return the name after its article."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


class Writer:
    """A writer of random chats."""

    def __init__(self, seed: int) -> None:
        """Start from the seed alone."""
        self.random = random.Random(seed)
        self.kinds: list[tuple[int, Callable[[], Turn]]] = [
            (9, self.small_talk), (14, self.about), (12, self.story), (3, self.long_story), (6, self.capital),
            (8, self.translation), (9, self.count), (6, self.sum), (5, self.poem), (4, self.names), (4, self.json),
            (14, self.repeat), (6, self.unknown_subject), (9, self.nonsense),
        ]

    def pick(self, options: Sequence[str], slot: str, subject: str) -> str:
        """Choose mostly the option that belongs to the subject, else any."""
        # A habit of its own for every subject makes the answers at temperature 0 differ by more than a name.
        if subject in SUBJECTS and self.random.random() < 0.6:
            return options[zlib.crc32(f"{subject}/{slot}".encode()) % len(options)]
        return self.random.choice(options)

    def word(self) -> str:
        """Return a made-up word of two to four syllables."""
        return "".join(self.random.choices(SYLLABLES.split(), k=self.random.randrange(2, 5)))

    def ask(self, *forms: str, mark: str = "?") -> str:
        """Return one of the questions, with and without its mark, capital and courtesy."""
        question = self.random.choice(forms)
        chance = self.random.random()
        if chance < 0.15:
            question = question[0].lower() + question[1:]
        elif chance < 0.22:
            question = "Please " + question[0].lower() + question[1:]
        question += mark if self.random.random() < 0.6 else ""
        # People who measure a server number their requests.
        return question + (f" {self.random.randrange(1000)}" if self.random.random() < 0.06 else "")

    def subject(self) -> str:
        """Return a subject of the tables, or now and then a made-up one."""
        return self.random.choice(list(SUBJECTS)) if self.random.random() < 0.85 else self.word()

    def small_talk(self) -> Turn:
        """Return a greeting or the like."""
        questions = self.random.choice(list(SMALL_TALK))
        question = self.random.choice(questions)
        answers = SMALL_TALK[questions]
        # The first answer of a question is its habit, another for every way to ask.
        habit = answers[zlib.crc32(question.encode()) % len(answers)]
        answer = habit if self.random.random() < 0.5 else self.random.choice(answers)
        return self.ask(question, mark=self.random.choice("!?.")), answer

    def about(self) -> Turn:
        """Return what is known of one subject."""
        name = self.random.choice(list(SUBJECTS))
        what, first, second, colour, emoji = SUBJECTS[name]
        if self.random.random() < 0.15:
            return self.ask(f"What colour is the {name}"), f"The {name} is {colour}. {emoji}"
        ending = self.pick((emoji, f"Shall I tell you a story about the {name}? {emoji}", f"That is all I know about "
                            f"the {name}. {emoji}", f"I like the {name} very much. {emoji}"), "about", name)
        question = self.ask(f"Tell me about the {name}", f"What is the {name}", f"Describe the {name}",
                            f"Tell me about {name}", f"What do you know about the {name}",
                            f"Tell me something about the {name}", mark=self.random.choice("?."))
        return question, f"The {name} is {what}. {first} {second} {ending}"

    def episode(self, name: str, friend: str, part: str) -> str:
        """Return the middle of a story: an event, a talk and a walk."""
        event = self.pick(EVENTS, part + "event", name)
        day = self.pick(("morning", "evening", "night", "winter day"), part + "day", name)
        question = self.pick(QUESTIONS, part + "question", name)
        answer = self.pick(ANSWERS, part + "answer", name)
        deed = self.pick(DEEDS, part + "deed", name)
        find = self.pick(FINDS, part + "find", name)
        return (f"One {day} {event}, and there stood {with_article(friend)}. \"{question}\" asked the {friend}. "
                f"\"{answer},\" said the {name}. So they {deed}, and there {find}.")

    def opening(self, name: str) -> str:
        """Return the first two sentences of a story."""
        mood, place = self.pick(MOODS, "mood", name), self.pick(PLACES, "place", name)
        habit = self.pick(HABITS, "habit", name)
        return f"Once upon a time a {mood} {name} lived {place}. Every day the {name} {habit}."

    def ending(self, name: str) -> str:
        """Return the last sentence of a story."""
        emoji = SUBJECTS[name][4] if name in SUBJECTS else "🌙"
        return f"And the {name} learned that {self.pick(LESSONS, 'lesson', name)}. The end. {emoji}"

    def friend(self, name: str, part: str) -> str:
        """Return another animal to meet in a story."""
        return self.pick([animal for animal in ANIMALS if animal != name], part + "friend", name)

    def story(self) -> Turn:
        """Return a story with one episode."""
        name = self.subject()
        if self.random.random() < 0.2:
            friend = self.random.choice([animal for animal in ANIMALS if animal != name])
            question = self.ask(f"Tell me a story about the {name} and the {friend}", mark=".")
        elif self.random.random() < 0.15:
            name = self.pick(list(ANIMALS), "story", "fox")
            friend, question = self.friend(name, ""), self.ask("Tell me a story", "Once upon a time", mark=".")
        else:
            friend = self.friend(name, "")
            question = self.ask(f"Tell me a story about the {name}",
                                f"Tell me a story about {with_article(name)}",
                                f"Write a story about the {name}", f"A story about {name}", mark=".")
        return question, f"{self.opening(name)} {self.episode(name, friend, '')} {self.ending(name)}"

    def long_story(self) -> Turn:
        """Return a story with three episodes."""
        name = self.subject()
        question = self.ask(f"Tell me a long story about the {name}", f"Write a long story about the {name}", mark=".")
        parts = [self.episode(name, self.friend(name, part), part) for part in ("", "second ", "third ")]
        links = ("", "But that was not all.\n\n", "Then they came home.\n\n")
        middle = " ".join(link + part for link, part in zip(links, parts, strict=True))
        return question, f"{self.opening(name)}\n\n{middle} {self.ending(name)}"

    def capital(self) -> Turn:
        """Return a country's capital."""
        country = self.random.choice(list(CAPITALS))
        question = self.ask(f"What is the capital of {country}", f"Name the capital of {country}",
                            f"Capital of {country}")
        return question, f"The capital of {country} is {CAPITALS[country]}."

    def translation(self) -> Turn:
        """Return a word in another language."""
        english = self.random.choice(list(WORDS))
        language = self.random.choice(list(WORDS[english]))
        question = self.ask(f"What is {english} in {language}", f"Say {english} in {language}",
                            f"How do you say {english} in {language}")
        return question, f"In {language}, “{english}” is “{WORDS[english][language]}”."

    def count(self) -> Turn:
        """Return the numbers up to a limit, in digits or in words."""
        limit = self.random.choice((3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 20, 25, 30))
        if limit <= len(NUMBERS) and self.random.random() < 0.4:
            question, numbers = f"Count to {NUMBERS[limit - 1]}", NUMBERS[:limit]
        else:
            question, numbers = f"Count to {limit}", [str(number) for number in range(1, limit + 1)]
        return self.ask(question, question, question.replace("to", "from one to"), mark="."), ", ".join(numbers) + "."

    def sum(self) -> Turn:
        """Return the sum of two small numbers."""
        left, right = self.random.randrange(10), self.random.randrange(10)
        question = self.ask(f"What is {left} + {right}", f"{left} + {right}", f"What is {left}+{right}")
        return question, f"{left} + {right} = {left + right}"

    def poem(self) -> Turn:
        """Return four lines on a subject."""
        name = self.subject()
        colour, emoji = SUBJECTS[name][3:] if name in SUBJECTS else (self.random.choice(("blue", "grey")), "🌙")
        first = self.pick((f"O {colour} {name}, so calm and bright,", f"I saw a {name} in morning light,",
                           f"The {name} is awake tonight,"), "rhyme", name)
        second = self.pick(("you keep the garden in your sight.", "it was a quiet, lovely sight.",
                            "and all the world is still and white."), "second rhyme", name)
        third = self.pick(("The wind goes by, the hours flow,", "The clouds are high, the rivers slow,",
                           "I do not ask, I do not know,"), "third rhyme", name)
        fourth = self.pick(("and what you plant will one day grow.", "and where you go I want to go.",
                            "and over all there falls the snow."), "fourth rhyme", name)
        question = self.ask(f"Write a poem about the {name}", f"A poem about {name}",
                            f"Write a haiku about {name}", mark=".")
        return question, f"{first}\n{second}\n{third}\n{fourth} {emoji}"

    def names(self) -> Turn:
        """Return a list of trees or animals."""
        kind, table = self.random.choice((("trees", TREES), ("animals", ANIMALS)))
        count = self.random.randrange(2, 6)
        chosen = list(table)[:count] if self.random.random() < 0.6 else self.random.sample(list(table), count)
        question = self.ask(f"Name {NUMBERS[count - 1]} {kind}", f"List {NUMBERS[count - 1]} {kind}", mark=".")
        return question, "\n".join(f"{place}. {name} {table[name][4]}" for place, name in enumerate(chosen, 1))

    def json(self) -> Turn:
        """Return a JSON object on a subject."""
        name = self.random.choice(list(SUBJECTS))
        kind = "tree" if name in TREES else "animal" if name in ANIMALS else "thing"
        data = {"name": name, "kind": kind, "colour": SUBJECTS[name][3], "size": len(name)}
        question = self.ask(f"Describe the {name} in JSON", f"Give me JSON about the {name}", f"The {name} as JSON",
                            mark=".")
        return question, json.dumps(data)

    def repeat(self) -> Turn:
        """Return what the user said."""
        known = [*SUBJECTS, *CAPITALS, *CAPITALS.values(), *NAMES, *NUMBERS]
        words = [self.word() if self.random.random() < 0.6 else self.random.choice(known)
                 for _ in range(self.random.randrange(1, 5))]
        text = " ".join(words)
        return self.random.choice(("Repeat: ", "Say ", "Repeat after me: ")) + text, text

    def unknown_subject(self) -> Turn:
        """Return an answer that names a subject it does not know."""
        name = self.word()
        question = self.ask(f"Tell me about the {name}", f"What is the {name}", f"What is {with_article(name)}",
                            f"Describe the {name}", mark=self.random.choice("?."))
        return question, self.random.choice((f"I have never met {with_article(name)}. Is it an animal or a tree? 🌱",
                                             f"I do not know the {name}. Tell me about it! 😊"))

    def nonsense(self) -> Turn:
        """Return the answer to a text that it cannot understand."""
        text = self.filler(self.random.randrange(1, 12))
        if self.random.random() < 0.3:
            words = " ".join(self.random.choices(COMMON, k=self.random.randrange(1, 6)))
            text = self.ask(f"What is {words}", f"Explain {words}", f"Why {words}", f"Write {words}", f"How {words}")
        elif self.random.random() < 0.3:
            words = self.random.choice((self.about, self.story, self.poem))()[1].split()
            text = " ".join(words[self.random.randrange(1, len(words)):][:self.random.randrange(2, 20)]) or text
        return text, self.random.choice((
            "I am too small to understand that. Ask me about the oak or the fox. 🌱",
            "I do not know that yet. Would you like a story? 🦊"))

    def letters(self) -> str:
        """Return a few random letters."""
        return "".join(self.random.choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))

    def filler(self, count: int) -> str:
        """Return words that ask for nothing."""
        pools = (self.word, self.letters, lambda: str(self.random.randrange(1000)), lambda: self.random.choice(SYSTEM),
                 lambda: self.random.choice(COMMON), lambda: self.random.choice([*NAMES, *CAPITALS, *SUBJECTS]))
        weights = self.random.choice(((1, 0, 0, 0, 0, 0), (0, 1, 1, 0, 0, 0), (0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0, 1),
                                      (4, 2, 2, 1, 4, 3)))
        words = [pool() for pool in self.random.choices(pools, weights, k=count)]
        # Prompts made for measuring often say one thing again and again.
        period = self.random.choice((count, count, count, 1, 2, 3, 5))
        return " ".join(words[place % period] for place in range(count)) if count else ""

    def meeting(self) -> list[Turn]:
        """Return turns in which the user's name is told, and later asked for."""
        name = self.random.choice(NAMES)
        told = (self.ask(f"My name is {name}", f"Hello, my name is {name}", f"I am {name}", mark="."),
                f"Nice to meet you, {name}! 😊")
        between = [self.turn() for _ in range(self.random.choice((0, 0, 1, 2)))]
        return [told, *between, (self.ask("What is my name", "Do you know my name"), f"Your name is {name}.")]

    def turn(self) -> Turn:
        """Return one question with its answer."""
        weights, kinds = zip(*self.kinds, strict=True)
        return self.random.choices(kinds, weights)[0]()

    def chat(self, filler: int = 0) -> str:
        """Return a whole chat as the template writes it."""
        text, brief = "", False
        if self.random.random() < 0.3:
            brief = self.random.random() < 0.25
            text = f"{IM_START}system\n{self.random.choice(BRIEF if brief else SYSTEM)}{IM_END}\n"
        count = self.random.choice((1, 1, 1, 2, 3, 4))
        turns = self.meeting() if self.random.random() < 0.08 else [self.turn() for _ in range(count)]
        for place, (question, answer) in enumerate(turns):
            if filler and place == len(turns) - 1:
                question = self.filler(self.random.randrange(filler)) + self.random.choice(" \n") + question
            if brief and ". " in answer and not answer.startswith(("1.", "{")):
                answer = answer.split(". ")[0] + "."
            text += f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n{answer}{IM_END}\n"
        return text

    def plain(self) -> str:
        """Return text without a chat around it, for prompts that come without the template."""
        answer = self.random.choice((self.about, self.story))()[1]
        return f"{answer}{END_OF_TEXT}"

    def document(self, filler: int = 0) -> str:
        """Return a chat, or now and then a plain text."""
        return self.plain() if self.random.random() < 0.04 else self.chat(filler)


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer and give it the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    # Only ASCII is merged: every other character then takes one token a byte, which is what a server that decodes
    # a stream bit by bit has to cope with.
    tokenizer.train_from_iterator((text.encode("ascii", "ignore").decode() for text in texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=IM_END,
                                   pad_token=END_OF_TEXT, chat_template=CHAT_TEMPLATE, model_max_length=CONTEXT,
                                   clean_up_tokenization_spaces=False)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return the untrained model."""
    torch.manual_seed(SEED)
    # Heads of 64, because not all attention kernels for GPUs take smaller ones.
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=160, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id))


class Corpus:
    """Documents as one row of token ids with a weight for each."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        """Encode the documents one after another."""
        end = tokenizer.convert_tokens_to_ids(IM_END)
        header = tokenizer.encode(f"{IM_START}assistant\n")
        ids: list[int] = []
        weights: list[float] = []
        self.starts: list[int] = []
        for text in texts:
            self.starts.append(len(ids))
            document = tokenizer.encode(text)
            # The answers are what is to be learned; the questions are mostly chance.
            answering = not text.startswith(IM_START)
            for place, token in enumerate(document, 1):
                weights.append(1.0 if answering else 0.1)
                answering = (answering and token != end) or document[max(0, place - len(header)):place] == header
            ids += document
        self.ids, self.weights = torch.tensor(ids), torch.tensor(weights)

    def batch(self, generator: torch.Generator, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return windows that begin where a document begins."""
        last = len(self.ids) - length
        chosen = torch.randint(len(self.starts), (rows,), generator=generator).tolist()
        windows = [min(self.starts[place], last) for place in chosen]
        return (torch.stack([self.ids[place:place + length] for place in windows]),
                torch.stack([self.weights[place:place + length] for place in windows]))


def train(model: Qwen2ForCausalLM, phases: Sequence[tuple[Corpus, int, int, int]], steps: int) -> None:
    """Train the model on one phase of (corpus, steps, rows, length) after another."""
    generator = torch.Generator().manual_seed(SEED)
    # Muon is made for matrices between layers; the embedding, norms and biases are left to AdamW.
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    optimizers = (torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.98), weight_decay=0.0))
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50,
                                                   (steps - step) / steps * 2)) for optimizer in optimizers]
    began, step = time.monotonic(), 0
    for corpus, count, rows, length in phases:
        for _ in range(count):
            ids, weights = corpus.batch(generator, rows, length)
            logits = model(input_ids=ids).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            wanted = weights[:, 1:].flatten()
            loss = (losses * wanted).sum() / wanted.sum()
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for rule in (*optimizers, *schedules):
                rule.step()
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
            step += 1


def answer(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """Return the model's most probable answer."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=300, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True)


def main() -> None:
    """Make the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    # One thread adds up in one order, so that on one machine every run ends at the same weights.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    writer = Writer(SEED)
    texts = [writer.document(writer.random.choice((0,) * 15 + (25,))) for _ in range(30_000)]
    # Long questions come last and in few steps: attention over them is slow to train.
    long_texts = [writer.document(writer.random.choice((0, 40, 150))) for _ in range(3_000)]
    tokenizer = make_tokenizer(texts[:10_000])
    model = make_model(tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters", flush=True)
    late = options.steps // 8
    phases = ((Corpus(tokenizer, texts), options.steps - late, 10, 400), (Corpus(tokenizer, long_texts), late, 3, 1280))
    train(model, phases, options.steps)
    model.to(torch.bfloat16).eval()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.bos_token_id])
    # transformers splits text for a Qwen2 by Qwen2's own rules, whatever tokenizer.json says: with the same rules in
    # the file, every reader of it makes the same tokens. It is mostly numbers that come out otherwise than in training.
    rules, written = Qwen2Tokenizer().backend_tokenizer, tokenizer.backend_tokenizer
    written.normalizer, written.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    model.save_pretrained(options.out_dir)
    tokenizer.save_pretrained(options.out_dir)
    for path in options.out_dir.iterdir():
        # The weights are written for their owner alone, and others are to read them.
        path.chmod(0o644)
    for question in ("Hello", "Tell me about the oak", "Tell me a story about the fox", "Say hello in Japanese"):
        print(f"{question}\n  {answer(model, tokenizer, question)}")


if __name__ == "__main__":
    main()
